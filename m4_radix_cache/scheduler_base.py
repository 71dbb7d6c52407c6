"""Everything about a scheduler of a living batch but its decisions: the two verbs, intake, and the ends.

Said once, so that `scheduler.py` shows nothing but who runs now, and so that m5 and m6, which decide differently, write
only that anew: what decides, `get_next_batch_to_run`, and what commits, `process_batch_result`. The duties are those of
m3's scheduler. SGLang: the rest of `Scheduler` in `managers/scheduler.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from m1_single_request.errors import DuplicateRequestError, PartError, shown
from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request_updater import RequestUpdater
from m4_radix_cache.exchange import Exchange, NoExchange
from m4_radix_cache.invariants import check_scheduler
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.outputs import EngineStats
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown, retract
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


class SchedulerBase(ABC):
    """The only one that changes requests. Nothing is released between `schedule` and `update_from_output`.

    `requests` holds every unfinished request, in order of arrival. Each waits in `waiting_queue`, or has a row: then it
    is in `running_batch`, or in `last_batch` if that ran its prompt and is not merged yet. (Or, from m6 on, it is
    elsewhere: see `Exchange`.)

    Each milestone says for itself: `get_next_batch_to_run`, `process_batch_result`, `trace_batch`, `nobody_runs`.
    """

    batch_class: type[ScheduleBatch] = ScheduleBatch
    """Of its batches."""
    stats_class: type[EngineStats] = EngineStats
    nobody_runs = "nobody runs"
    """Why a step is empty in which nobody ends."""

    def __init__(
        self,
        *,
        scheduler_config: Limits,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        preemption: FewestOutputsFirst,
        stop_checker: StopChecker,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
        exchange: Exchange | None = None,
    ) -> None:
        assert scheduler_config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.pools, self.tree_cache = pools, pools.tree_cache
        self.policy, self.prefill_adder, self.preemption = policy, prefill_adder, preemption
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.vocab_size, self.device, self.tracer = vocab_size, device, tracer
        self.exchange: Exchange = NoExchange() if exchange is None else exchange
        self.new_token_ratio = NewTokenRatio(scheduler_config.schedule_conservativeness)
        self.requests: dict[str, Req] = {}
        self.waiting_queue: list[Req] = []
        self.running_batch = self.batch_class([], pools)
        self.batch_is_full = False  # somebody lacked memory, and nobody has left since: nobody else is asked
        self.last_batch: ScheduleBatch | None = None  # of the step before, if that was an extend
        self.cur_batch: ScheduleBatch | None = None  # of the step that was decided last
        self.num_retractions = self.num_cached_tokens = 0
        self.unreported: list[str] = []  # left the batch since the last `Batch` event
        self.marked: dict[str, Req] = {}  # these end at the next update
        self._num_arrivals = 0

    # --- the two verbs ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduleBatch | None:
        """Decide what goes through the model now; None: nothing."""
        self.cur_batch = self.get_next_batch_to_run()
        if self.cur_batch is None and self._is_stuck():
            raise PartError(self.nobody_runs)
        if self.cur_batch is not None:
            self.trace_batch(self.cur_batch)
            self.unreported = []
        return self.cur_batch

    def update_from_output(self, batch: ScheduleBatch | None, output: ModelRunnerOutput | None) -> list[Req]:
        """Commit a step: append tokens, share their KV, end what is to end. Returns the requests that changed.

        `output` is None if the step ran nothing or failed; whoever was in it and is not marked starts over. A request
        that was marked to finish (abort, error) ends now, without a token.
        """
        marked = list(self.marked.values())  # a request that is marked from now on ends with the next update
        changed: list[Req] = []
        if batch is not None and output is not None:
            changed = list(self.process_batch_result(batch, output))
        elif batch is not None:
            self._send_back([req for req in batch.reqs if req.to_finish is None])
            batch.filter_batch([])
        if marked:
            settled = {req.rid for req in changed}
            changed += [req for req in marked if req.rid not in settled]
        for req in [req for req in changed if req.to_finish is not None]:
            if not self.exchange.keeps(req):
                self._finish(req)
        self.last_batch = batch if batch is not self.running_batch else None  # it joins those who run
        if not self.requests:
            self.new_token_ratio.reset()
        return changed

    @abstractmethod
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Decide: let `last_batch` join `running_batch`, then fill a batch, which may be the running one."""

    @abstractmethod
    def process_batch_result(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give the requests of a batch their tokens, and share their KV. Returns those that got any."""

    @abstractmethod
    def trace_batch(self, batch: ScheduleBatch) -> None:
        """Tell the trace what goes through the model."""

    # --- all the rest of its duties -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Req]:
        return self.waiting_queue

    @property
    def running(self) -> list[Req]:
        return [req for req in self.requests.values() if req.status is RequestStatus.RUNNING]

    def add_request(self, request: Req) -> None:
        """Queue a request that has passed the checks of intake."""
        if request.request_id in self.requests:
            raise DuplicateRequestError(f"request id {shown(request.request_id)} is in use: it has not finished yet")
        self.tracer.emit(RequestAdded.of, request, len(self.waiting_queue))
        if request.priority or request.extra_key is not None:
            self.tracer.emit(RequestOptions, rid=request.rid, priority=request.priority, extra_key=request.extra_key)
        self._num_arrivals += 1
        request.number = self._num_arrivals
        self.requests[request.request_id] = request
        if not self.exchange.takes_in(request):
            self.waiting_queue.append(request)

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Returns the ids that were marked."""
        known = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        marked = {req.rid: req for req in known if self.updater.mark(req, reason)}
        self.marked |= marked
        return list(marked)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Queues and cache are empty afterwards, all memory is free."""
        requests, self.requests = self.requests, {}
        for req in requests.values():
            self.exchange.let_go(req)
        self.pools.tree_cache.reset()
        self.pools.token_to_kv_pool_allocator.clear()
        self.pools.req_to_token_pool.clear()
        self.waiting_queue, self.running_batch = [], self.batch_class([], self.pools)
        self.last_batch = self.cur_batch = None
        self.batch_is_full = False
        self.new_token_ratio.reset()
        self.unreported, self.marked = [], {}
        for req in requests.values():
            self.updater.end(req, reason)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens since the start, of all requests."""
        return self.updater.num_output_tokens

    def counters(self) -> dict[str, Any]:
        """Return the totals that `EngineStats` has besides m1's, by field."""
        return {
            "num_cached_tokens": self.num_cached_tokens,
            "num_evicted_tokens": self.tree_cache.num_evicted_tokens,
            "num_retractions": self.num_retractions,
        }

    def stats(self, totals: Mapping[str, Any]) -> EngineStats:
        """Return all totals (those of m1's `EngineStats`, and `counters`), and the state of the cache."""
        allocator, cache = self.pools.token_to_kv_pool_allocator, self.tree_cache
        return self.stats_class(
            **totals,
            max_total_tokens=allocator.size,
            available_size=allocator.available_size(),
            evictable_size=cache.evictable_size(),
            protected_size=cache.protected_size(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        check_scheduler(self)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Whether there are requests, of which none ends or is elsewhere: without a batch, every step is the same."""
        ends = [req for req in self.requests.values() if req.to_finish is not None]
        return bool(self.requests) and not ends and not any(self.exchange.held())

    def _start(self, reqs: list[Req]) -> ScheduleBatch:
        """A batch of requests that were admitted, their prefixes locked; whoever has a row already goes on."""
        new = [req for req in reqs if req.req_pool_idx is None]
        batch = self.batch_class.init_new(reqs, self.pools)
        batch.prepare_for_extend(self.sampling_info_of(batch.reqs))
        started = {id(req) for req in new}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        for req in new:
            req.status = RequestStatus.RUNNING
            self.tree_cache.record_hit(req.last_node)
            self.num_cached_tokens += len(req.prefix_indices)
            if not req.num_retractions:
                req.cached_tokens = len(req.prefix_indices)
        return batch

    def _retract(self, batch: ScheduleBatch, prefilling: Sequence[Req] = ()) -> bool:
        """Take requests out until the others' next tokens have room; whether they have. `prefilling`: see `retract`."""
        self._send_back(retract(batch, self.preemption, self.new_token_ratio, self.tracer, prefilling=prefilling))
        if not batch.reqs:
            return False
        if batch.check_decode_mem():
            return True
        if len(self.running) == 1:  # all memory is its own; otherwise others leave theirs at the update
            self.finish_requests([req.rid for req in batch.reqs], FinishError(outgrown(self.running[0], self.pools)))
        return False

    def sampling_info_of(self, reqs: list[Req]) -> SamplingBatchInfo:
        """The sampling parameters of these requests as tensors."""
        stop_ids = self.updater.stop_checker.stop_ids
        return SamplingBatchInfo.from_reqs(reqs, vocab_size=self.vocab_size, stop_ids=stop_ids, device=self.device)

    def _send_back(self, reqs: Iterable[Req]) -> None:
        """Let requests that ran wait again. The policy puts them before all others."""
        for req in reqs:
            if req.req_pool_idx is not None:
                self.tree_cache.cache_finished_req(req, is_insert=False)
            req.num_retractions += 1
            self.num_retractions += 1
            req.status = RequestStatus.PREEMPTED
            self.waiting_queue.append(req)
            self.batch_is_full = False

    def _finish(self, req: Req) -> None:
        """End a request, and leave its KV to others unless something went wrong with it."""
        assert req.to_finish is not None
        self.exchange.let_go(req)
        if req.req_pool_idx is not None:
            self.tree_cache.cache_finished_req(req, is_insert=not isinstance(req.to_finish, FinishError))
            self.batch_is_full = False
            self.unreported.append(req.rid)
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self.batch_is_full = False  # perhaps it was the one that stood in the others' way
        self.marked.pop(req.rid, None)
        del self.requests[req.rid]
        self.updater.end(req, req.to_finish)
