"""Parallel sampling (`n > 1`): one request for the caller, n requests for the scheduler.

The engine core calls this class for intake, aborts and reset, and the scheduler for steps. It queues the children of a
`ParentRequest` (made by `build_family` in `input_processor.py`), and reports the parent when children change; a request
with `n = 1` is passed on unchanged. New in m3, because children of one prompt are worthwhile only if they share its KV.
vLLM: `v1/engine/parallel_sampling.py`; SGLang expands `n` in its tokenizer manager.
"""

from collections.abc import Iterable
from typing import Any

from m1_single_request.errors import DuplicateRequestError, shown
from m1_single_request.request import BaseFinishReason, FinishAbort, Request
from m1_single_request.tracer import Tracer
from m3_paged_attention.request import ParentRequest
from m3_paged_attention.scheduler_events import ParallelSampling


class RequestFamilies:
    """The queues of a scheduler, for parent requests: they are queued as children, and reported as parents."""

    def __init__(self, *, scheduler: Any, tracer: Tracer) -> None:
        self.scheduler = scheduler
        self.tracer = tracer
        self._parents: dict[str, ParentRequest] = {}  # request id -> unfinished parent

    def add_request(self, request: Request) -> None:
        """Queue a request, or all children of a parent.

        Raises `DuplicateRequestError` if one of the ids is in use; then none is queued.
        """
        self.check_ids(request)
        if not isinstance(request, ParentRequest):
            self.scheduler.add_request(request)
            return
        self.tracer.emit(ParallelSampling.of, request)
        self._parents[request.request_id] = request
        for child in request.children:
            self.scheduler.add_request(child)

    def check_ids(self, request: Request) -> None:
        """Raise `DuplicateRequestError` if an id of a request, or of one of its children, is in use."""
        ids = ids_of(request)
        for request_id in ids:
            if self.is_taken(request_id):
                family = (
                    f" (request {shown(request.request_id)} with n={len(ids) - 1} needs it)" if len(ids) > 1 else ""
                )
                raise DuplicateRequestError(
                    f"request id {shown(request_id)} is in use: it has not finished yet{family}"
                )

    def is_taken(self, request_id: str) -> bool:
        """Return whether an unfinished request has this id."""
        return request_id in self._parents or request_id in self.scheduler.requests

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark requests to end; a parent's id means all its children. Returns the given ids that were marked."""
        marked = []
        for request_id in request_ids:
            parent = self._parents.get(request_id)
            ids = [request_id] if parent is None else [c.request_id for c in parent.children if not c.is_finished]
            if self.scheduler.finish_requests(ids, reason):
                marked.append(request_id)
                parent = parent or self._parent_of(self.scheduler.requests[ids[0]])
                if parent is not None and isinstance(reason, FinishAbort):
                    parent.reassign_prompt_logprobs()
        return marked

    def _parent_of(self, request: Request) -> ParentRequest | None:
        return self._parents.get(getattr(request, "parent_id", None) or "")

    def reported(self, changed: Iterable[Request]) -> list[Request]:
        """Replace changed children by their parents: each request once, in the same order."""
        if not self._parents:
            return list(changed)
        found: dict[str, Request] = {}
        for request in changed:
            parent = self._parent_of(request)
            reported = request if parent is None else parent
            found[reported.request_id] = reported
        for request_id in self._parents.keys() & found.keys():
            self._parents[request_id].update_from_children()
            if self._parents[request_id].is_finished:
                del self._parents[request_id]
        return list(found.values())

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step."""
        self.scheduler.reset(reason)
        for parent in self._parents.values():
            parent.update_from_children()
        self._parents.clear()


def ids_of(request: Request) -> list[str]:
    """Return the id of a request, and those of its children."""
    children = request.children if isinstance(request, ParentRequest) else []
    return [request.request_id, *(child.request_id for child in children)]
