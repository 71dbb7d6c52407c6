"""Intake of requests whose images are read by other processes: they wait here, in front of the scheduler.

The scheduler does not have them, so that its steps go on. What has been read when a step begins is used: a request
whose images are all there is built again, with their placeholders in its prompt, and joins the waiting queue behind the
requests that came meanwhile. So a text may overtake an image, and the order depends on the time that reading takes; the
trace has it (`media_awaited`, `request_added`), and no token depends on it. A request that is aborted, or whose image
cannot be used, joins the queue marked, and the scheduler ends it with the next update, as any other. New in this
milestone. vLLM and SGLang: `AsyncLLM` and `TokenizerManager` await the images of a request before they send it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from m1_single_request.request import BaseFinishReason, FinishError, Request
from m1_single_request.tracer import Tracer
from m3_paged_attention.parallel_sampling import RequestFamilies, ids_of
from m6_multimodal_pd.events import MediaAwaited
from m6_multimodal_pd.input_processor import InputProcessor, children_of
from m6_multimodal_pd.multimodal.media_pool import MediaPool

LONGEST_WAIT_S = 0.05
"""Time that a call waits for images, or for engines, if no request can run, in seconds; then the caller has control
again."""


class MediaIntake(RequestFamilies):
    """m3's families, behind requests that wait for their images.

    `add_request` keeps such a request, `finish_requests` and `reset` end it, and its ids count as taken (`is_taken`).
    """

    def __init__(self, *, scheduler: Any, tracer: Tracer, input_processor: Any) -> None:
        super().__init__(scheduler=scheduler, tracer=tracer)
        self.input_processor: InputProcessor = input_processor
        prompts = input_processor.prompts
        self.pool: Any = None if prompts is None else MediaPool(prompts.media.settings, tracer)
        """None for a model without vision."""
        self.reading: dict[str, Request] = {}
        """Requests that wait for their images, by id, in order of arrival."""
        self._ids: set[str] = set()
        """Of these requests and of their children."""

    @property
    def is_only_reading(self) -> bool:
        """Whether there are requests, and none that a step could run or end."""
        return bool(self.reading) and not self.scheduler.requests

    def is_taken(self, request_id: str) -> bool:
        """Return whether an unfinished request has this id."""
        return request_id in self._ids or super().is_taken(request_id)

    def add_request(self, request: Request) -> None:
        """Queue a request, or keep it until its images are read. Raises `DuplicateRequestError`."""
        unread = getattr(children_of(request)[0], "unread", None)
        if unread is None:
            super().add_request(request)
            return
        self.check_ids(request)
        self.tracer.emit(MediaAwaited, rid=request.request_id, num_items=len(unread.jobs))
        self.reading[request.request_id] = request
        self._ids.update(ids_of(request))
        self.pool.submit(unread.jobs)

    def begin_step(self, add: Callable[[Request], None]) -> bool:
        """Call `add` with the requests whose images are all read since the last call, complete and in order of arrival;
        mark those whose images cannot be used. If no other request can run, wait a moment for one. Called while there
        are requests in `reading`.

        Returns whether there is a step to run: not while all requests wait for images.
        """
        if self.pool.receive(LONGEST_WAIT_S if self.is_only_reading else 0.0):
            for request_id, request in list(self.reading.items()):
                try:
                    whole = self.input_processor.completed(request)
                    if whole is not None:
                        self._ids.difference_update(ids_of(request))  # `add` checks that they are free
                        add(whole)
                        self._forget(request)
                except Exception as error:  # of the image, of a prompt that is too long, of a part of the user's own
                    self.finish_requests([request_id], FinishError(error))
        return not self.is_only_reading

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark requests to end. Returns the ids that were marked."""
        ids = list(request_ids)
        self._hand_over(ids)
        return super().finish_requests(ids, reason)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step."""
        self._hand_over(list(self.reading))
        super().reset(reason)

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()

    def _hand_over(self, request_ids: Iterable[str]) -> None:
        """Queue requests without their images, for the scheduler to end them."""
        for request_id in request_ids:
            if (request := self.reading.get(request_id)) is not None:
                self._forget(request)
                super().add_request(request)

    def _forget(self, request: Request) -> None:
        self.pool.cancel(children_of(request)[0].unread.jobs)
        del self.reading[request.request_id]
        self._ids.difference_update(ids_of(request))
