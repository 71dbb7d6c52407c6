"""Scheduler of a prefill engine: a prompt waits for room at a decode engine, and its KV stays until it is there.

    bootstrap_queue  --room there-->  waiting_queue  -->  runs, one token  -->  inflight_queue  --KV there-->  ends

Between the two queues a request waits and runs as in m5. New in this milestone. SGLang: `PrefillBootstrapQueue` and
`disagg_prefill_inflight_queue` in `disaggregation/prefill.py`.
"""

from typing import Any

from m1_single_request.request import BaseFinishReason, RequestStatus
from m4_radix_cache.invariants import check_scheduler
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd.disaggregation.first_token import HANDED_ON


class PrefillScheduler(Scheduler):
    """m5's scheduler with a queue before the waiting queue (`add_request`) and one behind the prompt (`finish`).

    `leave`, `is_stuck`, `reset` and `check_invariants` know the requests in these queues.
    """

    def __init__(self, **settings: Any) -> None:
        """`settings`: as m5's."""
        super().__init__(**settings)
        self.bootstrap_queue: dict[str, Req] = {}
        """By request id: the decode engine has not reported room yet."""
        self.inflight_queue: dict[str, Req] = {}
        """By request id: the prompt is computed, and its KV on its way."""

    @property
    def elsewhere(self) -> list[Req]:
        """The requests that wait for a decode engine."""
        return [*self.bootstrap_queue.values(), *self.inflight_queue.values()]

    def add_request(self, request: Req) -> None:
        """Queue a request until a decode engine has room for its KV."""
        super().add_request(request)  # appends it to the waiting queue
        self.bootstrap_queue[request.rid] = self.waiting_queue.pop()

    def bootstrapped(self, rid: str) -> None:
        """Move a request into the waiting queue: the decode engine has room for it."""
        self.waiting_queue.append(self.bootstrap_queue.pop(rid))

    def finish(self, req: Req) -> None:
        """End a marked request. If it has just got its first token, its KV stays until all of it has arrived."""
        if req.to_finish is not HANDED_ON:
            super().finish(req)
            return
        req.to_finish, req.status = None, RequestStatus.TRANSFERRING
        self.inflight_queue[req.rid] = req

    def leave(self, req: Req) -> None:
        """Remove a marked request from the unfinished ones, in whichever queue it is."""
        self.bootstrap_queue.pop(req.rid, None)
        self.inflight_queue.pop(req.rid, None)
        super().leave(req)

    def is_stuck(self) -> bool:
        """Return whether every step from now on is empty: no request ends or waits for a decode engine."""
        return not self.elsewhere and super().is_stuck()

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards queues and cache are empty, all memory is free."""
        self.bootstrap_queue.clear()
        self.inflight_queue.clear()
        super().reset(reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        waiting = [*self.waiting_queue, *self.bootstrap_queue.values()]
        check_scheduler(self, waiting, [*self.with_rows(), *self.inflight_queue.values()])
