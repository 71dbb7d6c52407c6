"""Everything about a scheduler of a living batch but its decisions: intake, marks, ends, and the way back to the queue.

Said once, so that `scheduler.py` shows nothing but who runs now, and so that m5 and m6, which decide differently, write
only that anew. The duties are those of m3's scheduler. SGLang: the rest of `Scheduler` in `managers/scheduler.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from m1_single_request.errors import DuplicateRequestError
from m1_single_request.outputs import EngineStats as SingleRequestStats
from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.preemption import PreemptionPolicy
from m4_radix_cache.errors import blamed_on
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.outputs import EngineStats
from m4_radix_cache.recovery import Phase, check_scheduler, recover
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from m4_radix_cache.schedule_policy import SchedulePolicy
from m4_radix_cache.scheduler_events import RequestOptions


class Limits(Protocol):
    """What a scheduler's configuration says to any scheduler of a living batch."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int | None: ...
    @property
    def schedule_conservativeness(self) -> float: ...


class SchedulerBase:
    """The only one that changes requests. Nothing is released between `schedule` and `update_from_output`.

    `requests` holds every unfinished request, in order of arrival. Each waits in `waiting_queue`, or has a row: then it
    is in `running_batch`, or in `last_batch` if that ran its prompt and is not merged yet.

    Seams for later milestones: `batch_class`; `stats`, which knows more there; `check_invariants`.
    """

    batch_class: type[ScheduleBatch] = ScheduleBatch
    """Of its batches."""

    def __init__(
        self,
        *,
        scheduler_config: Limits,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        preemption: PreemptionPolicy,
        stop_checker: StopChecker,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
    ) -> None:
        assert scheduler_config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.pools, self.tree_cache = pools, pools.tree_cache
        self.policy, self.prefill_adder, self.preemption = policy, prefill_adder, preemption
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.vocab_size, self.device, self.tracer = vocab_size, device, tracer
        self.new_token_ratio = NewTokenRatio(scheduler_config.schedule_conservativeness)
        self.requests: dict[str, Req] = {}
        self.waiting_queue: list[Req] = []
        self.running_batch = self.batch_class([], pools)
        self.batch_is_full = False  # somebody lacked memory, and nobody has left since: nobody else is asked
        self.last_batch: ScheduleBatch | None = None  # of the step before, if that was an extend
        self.cur_batch: ScheduleBatch | None = None  # of the step that was decided last
        self.num_retractions = self.num_cached_tokens = 0
        self.phase = Phase.IDLE
        self.marked: dict[str, Req] = {}  # who ends at the next update, wherever it stands
        self.untold: list[str] = []  # who ended since the last batch that the trace has heard of
        self._num_arrivals = 0

    @property
    def waiting(self) -> list[Req]:
        return self.waiting_queue

    @property
    def running(self) -> list[Req]:
        return [req for req in self.requests.values() if req.status is RequestStatus.RUNNING]

    def add_request(self, request: Req) -> None:
        """Queue a request that has passed the checks of intake."""
        if request.request_id in self.requests:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use: it has not finished yet")
        self.updater.trace_arrival(request, num_waiting=len(self.waiting_queue))
        if self.tracer and (request.priority or request.extra_key is not None):
            self.tracer.emit(RequestOptions(rid=request.rid, priority=request.priority, extra_key=request.extra_key))
        self._num_arrivals += 1
        request.number = self._num_arrivals
        self.requests[request.request_id] = request
        self.waiting_queue.append(request)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs, aborted ones included until their end was reported."""
        return bool(self.requests)

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Returns the ids that were marked."""
        known = {request_id: self.requests[request_id] for request_id in request_ids if request_id in self.requests}
        self.marked |= known  # first: an interrupt may leave one here that is not marked, but none unseen that is
        return [request_id for request_id, request in known.items() if self.updater.mark(request, reason)]

    def give_up(self) -> list[str]:
        """After `schedule` raised: nothing runs in this step, and nobody's KV is trusted. Returns those who ran."""
        running = [req.rid for req in self.running]
        recover(self)
        self.phase = Phase.IN_FLIGHT
        return running or list(self.requests)

    def stats(self, totals: Mapping[str, Any]) -> SingleRequestStats:
        """The engine's totals (the fields of m1's `EngineStats`), and the state of the cache."""
        allocator, cache = self.pools.token_to_kv_pool_allocator, self.tree_cache
        return EngineStats(
            **totals,
            max_total_tokens=allocator.size,
            available_size=allocator.available_size(),
            evictable_size=cache.evictable_size(),
            protected_size=cache.protected_size(),
            num_cached_tokens=self.num_cached_tokens,
            num_evicted_tokens=cache.num_evicted_tokens,
            num_retractions=self.num_retractions,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        check_scheduler(self)

    def _sampling_info(self, reqs: list[Req]) -> SamplingBatchInfo:
        """How the next tokens of these requests are chosen. Raises `PartError` if the stop checker fails."""
        stop_checker = self.updater.stop_checker
        with blamed_on("stop_checker", stop_checker):
            return SamplingBatchInfo.from_reqs(
                reqs, vocab_size=self.vocab_size, stop_ids=stop_checker.stop_ids, device=self.device
            )

    def _send_back(self, reqs: Iterable[Req]) -> None:
        """Let requests that ran wait again. The policy puts them before all others."""
        for req in reqs:
            if req.req_pool_idx is not None:
                self.tree_cache.cache_finished_req(req, is_insert=False)
            req.num_retractions += 1
            self.num_retractions += 1
            req.set_status(RequestStatus.PREEMPTED)
            self.waiting_queue.append(req)
            self.batch_is_full = False

    def _finish(self, req: Req) -> None:
        """End a request, and leave its KV to others unless something went wrong with it."""
        assert req.to_finish is not None
        self.updater.end(req, req.to_finish)
        if req.req_pool_idx is not None:
            self.tree_cache.cache_finished_req(req, is_insert=not isinstance(req.to_finish, FinishError))
            self.batch_is_full = False
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self.batch_is_full = False  # perhaps it was the one that stood in the others' way
        if self.tracer:
            self.untold.append(req.rid)
        self.marked.pop(req.rid, None)
        del self.requests[req.rid]  # last: as long as it is here, an interrupted update is made again
        self.updater.trace_end(req)
