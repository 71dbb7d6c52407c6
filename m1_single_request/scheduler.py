"""Scheduler: choose the request that runs in the next step, one at a time, in order of arrival.

Every scheduler of the course has the same two verbs. `schedule()` decides the tokens of the next forward;
`update_from_output()` commits the result and ends finished requests. Here the decision is small: the oldest request
runs alone, its whole prompt first (prefill), then one token per step (decode). m2 lets many requests share a step.
vLLM: `v1/core/sched/scheduler.py`; SGLang: `managers/scheduler.py`.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from m1_single_request.events import Admit, Batch, RequestAdded
from m1_single_request.request import BaseFinishReason, Request, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


@dataclass(frozen=True)
class SchedulerOutput:
    """The decision of one step: the new tokens of one request. The runner needs nothing else."""

    request_id: str
    token_ids: tuple[int, ...]
    """The new tokens: the whole prompt, or the newest output token."""
    start_position: int
    """Position of the first new token = number of tokens whose KV exists already."""
    wants_prompt_logits: bool = False
    """The runner returns logits for every new token, not only for the last."""


class Scheduler:
    """Owns all unfinished requests. No memory is released between `schedule` and `update_from_output`."""

    requests: dict[str, Request]
    """All unfinished requests by id, in order of arrival."""
    waiting: deque[Request]
    running: list[Request]
    """Empty, or one request."""
    updater: RequestUpdater

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.tracer = tracer
        self.requests, self.waiting, self.running = {}, deque(), []

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the checks of intake, with an id that is not in use."""
        self.tracer.emit(RequestAdded.of, request, len(self.waiting))
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput | None:
        """Return the decision of the next step; None if there is nothing to compute."""
        if not self.running:
            self._admit()
        if not self.running or self.running[0].to_finish is not None:
            return None
        request = self.running[0]
        sequence = request.sequence
        start = sequence.num_computed_tokens
        new = tuple(sequence.prompt_token_ids if start == 0 else sequence.output_token_ids[-1:])
        self.tracer.emit(
            Batch,
            mode="prefill" if start == 0 else "decode",
            rids=(request.request_id,),
            extend_lens=(len(new),),
            prefix_lens=(start,),
            seq_lens=(start + len(new),),
        )
        wants_prompt_logits = start == 0 and request.sampling_params.prompt_logprobs is not None
        return SchedulerOutput(request.request_id, new, start, wants_prompt_logits)

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        """Commit a step: append tokens, end finished requests. Returns the requests that changed, oldest first.

        `sampled` holds the new tokens by request id; it is empty if the step failed or ran nothing. A request that was
        marked to finish (abort, error) ends now and its tokens of this step are dropped.
        """
        changed = [request for request in self.requests.values() if request.to_finish or request.request_id in sampled]
        for request in changed:
            if request.to_finish is None and scheduler_output is not None:
                self.updater.commit(request, sampled[request.request_id], num_new_kv=len(scheduler_output.token_ids))
            if request.to_finish is not None:
                self._finish(request, request.to_finish)
        return changed

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Returns the ids that were marked."""
        return [
            request_id
            for request_id in request_ids
            if request_id in self.requests and self.updater.mark(self.requests[request_id], reason)
        ]

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step; all queues are empty afterwards."""
        requests, self.requests = self.requests, {}
        self.waiting.clear()
        self.running.clear()
        for request in requests.values():
            self.updater.end(request, reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if the queues contradict each other; tests call this after every step."""
        queued = [*self.running, *self.waiting]
        assert len(self.running) <= 1
        assert {r.request_id: r for r in queued} == self.requests and len(queued) == len(self.requests)
        for request in queued:
            sequence = request.sequence
            state = RequestStatus.RUNNING if request in self.running else RequestStatus.WAITING
            assert request.status is state
            done = sequence.get_len() - 1 if sequence.output_token_ids else 0
            assert sequence.num_computed_tokens == done, "a decoding request has KV for all tokens but the newest"

    def _admit(self) -> None:
        """Admit the oldest waiting request. One that is marked to finish stays in the queue: the update ends it."""
        request = next((r for r in self.waiting if r.to_finish is None), None)
        if request is None:
            return
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        num_new, num_waiting = request.sequence.get_prompt_len(), len(self.waiting)
        self.tracer.emit(Admit, rid=request.request_id, prefix=0, extend=num_new, num_waiting=num_waiting)

    def _finish(self, request: Request, reason: BaseFinishReason) -> None:
        """Remove a request from its queue and end it. The step frees its KV."""
        (self.running if request in self.running else self.waiting).remove(request)
        del self.requests[request.request_id]
        self.updater.end(request, reason)
