"""Scheduler of a batch that is kept from step to step, for requests that start from cached KV.

m3 chose the requests of every step anew. Here a running batch is kept from step to step. A step either admits waiting
requests and runs their prompts (EXTEND), or gives every running request a token (DECODE). The policy orders the waiting
requests; what the cache holds of a prompt is not computed again and does not count against the budget. When memory runs
out, unused cached KV is evicted first, then a running request is retracted. SGLang: `Scheduler.get_next_batch_to_run`
and `process_batch_result`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from m1_single_request.errors import PartError
from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request_updater import RequestUpdater
from m4_radix_cache.config import SchedulerConfig
from m4_radix_cache.events import Audit, Batch, Matched, RequestOptions
from m4_radix_cache.invariants import check_scheduler, pages_of
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.outputs import EngineStats
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.priority_preemption import may_preempt
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown, retract
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from m4_radix_cache.schedule_policy import SchedulePolicy, checked


class Scheduler:
    """Chooses the requests of each step and commits its result; the only class that changes requests.

    Nothing is released between `schedule` and `update_from_output`. `requests` holds every unfinished request, in order
    of arrival. Each is in `waiting_queue`, or has a row of slots: then it is in `running_batch`, or in `last_batch` if
    that has run its prompt and is not merged yet.
    """

    batch_class: type[ScheduleBatch] = ScheduleBatch
    batch_event: type[Any] = Batch
    stats_class: type[EngineStats] = EngineStats
    nothing_runs = "the parts 'schedule_policy' and 'prefill_adder' admit no request, and none runs"
    """The error of a step that is empty, although no request ends."""

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        preemption: FewestOutputsFirst,
        stop_checker: StopChecker,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
    ) -> None:
        """`scheduler_config`: with a token budget. `prefill_adder`: the class of the adders, one per prefill batch."""
        assert scheduler_config.max_num_seqs and scheduler_config.max_num_batched_tokens, "it must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.pools, self.tree_cache = pools, pools.tree_cache
        self.policy, self.prefill_adder, self.preemption = policy, prefill_adder, preemption
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.vocab_size, self.device, self.tracer = vocab_size, device, tracer
        self.new_token_ratio = NewTokenRatio(scheduler_config.schedule_conservativeness)
        self.preemption_threshold: int | None = None  # None: no request is preempted for its priority
        if scheduler_config.priority_preemption:
            self.preemption_threshold = scheduler_config.preemption_threshold
        self.requests: dict[str, Req] = {}
        self.waiting_queue: list[Req] = []
        self.running_batch = self.batch_class([], pools)
        self.batch_is_full = False  # a request lacked memory, and none has left since: no other is tried
        self.last_batch: ScheduleBatch | None = None  # of the last step, if it ran prompts
        self.cur_batch: ScheduleBatch | None = None  # of the step that was scheduled last
        self.num_retractions = self.num_preemptions = self.num_cached_tokens = 0
        self.unreported: list[str] = []  # ids of requests that have left since the last `Batch` event
        self.marked: dict[str, Req] = {}  # to end at the next update
        self._num_arrivals = 0

    # --- the two verbs ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduleBatch | None:
        """Choose the batch of the next step; return None if there is nothing to compute."""
        self.tree_cache.begin_step()
        self.cur_batch = self.get_next_batch_to_run()
        if self.cur_batch is None and not self.tree_cache.wait_for_disk() and self.is_stuck():
            raise PartError(self.nothing_runs)
        if self.cur_batch is not None:
            self.tracer.emit(self.batch_event.of, self.cur_batch, self)
            self.unreported = []
        return self.cur_batch

    def update_from_output(self, batch: ScheduleBatch | None, output: ModelRunnerOutput | None) -> list[Req]:
        """Commit a step: append tokens, share their KV, end finished requests. Return the changed requests.

        `output` is None if the step ran no model or failed. After a failure the requests of the batch that are not
        marked start again. A request that is marked to finish (abort, error) ends now, without a token.
        """
        marked = list(self.marked.values())  # of those that are marked from now on, only the changed ones end now
        changed: list[Req] = []
        if batch is not None and output is not None:
            changed = list(self.process_batch_result(batch, output))
        elif batch is not None:
            self.send_back([req for req in batch.reqs if req.to_finish is None])
            batch.filter_batch([])
        if marked:
            settled = {req.rid for req in changed}
            changed += [req for req in marked if req.rid not in settled]
        for req in [req for req in changed if req.to_finish is not None]:
            self.finish(req)
        self.last_batch = batch if batch is not self.running_batch else None  # it joins the running batch next
        if not self.requests:
            self.new_token_ratio.reset()
        if self.pools.debug:
            self.tracer.emit(Audit.of, self, pages_of)
        return changed

    # --- the two decisions --------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Return a batch of waiting requests whose prompts fit; else the running batch, for one token each; else None.
        First merge the requests whose prompt ran in the last step into the running batch."""
        self.merge_last_batch()
        return self._get_new_batch_prefill() or self._update_running_batch()

    def process_batch_result(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give every request its new token, and the KV of prompts to the cache. Return the requests with a token."""
        reqs, token_ids = batch.take_tokens(output)
        is_extend = batch.forward_mode is ForwardMode.EXTEND
        others: Iterable[int] = range(len(reqs))
        if not is_extend:
            others = self.updater.commit_simply(reqs, token_ids)
        for index in others:
            req = reqs[index]
            if req.to_finish is None:
                of_prompt = output.prompt_logprobs.get(req.rid)
                sampled = SampledTokens((token_ids[index],), tuple(output.logprobs[index]), of_prompt)
                self.updater.commit(req, sampled, num_new_kv=req.extend_input_len if is_extend else 1)
            if is_extend and req.to_finish is None:
                self.tree_cache.cache_unfinished_req(req)
        return reqs

    def _get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Admit waiting requests in the order of the policy, as long as rows, tokens and memory allow."""
        rows = self.pools.req_to_token_pool
        if (self.batch_is_full or not rows.available_size()) and not self.may_preempt():
            return None
        waiting = [r for r in self.waiting_queue if r.to_finish is None and not self.tree_cache.is_waiting(r)]
        if not waiting:
            return None
        adder = self._new_adder(rows.available_size(), len(waiting))
        for req in checked(self.policy.calc_priority(list(waiting)), self.policy, waiting).ready:
            req.init_next_round_input(self.tree_cache)
            self.tracer.emit(Matched.of, req)
            if not self.preempts_for(req, adder):
                break
            result = adder.add_one_req(req)
            if result is AddReqResult.NO_TOKEN and not rows.num_used and not adder.can_run_list:
                self.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))  # even alone it does not fit
            elif result is not AddReqResult.CONTINUE:
                self.batch_is_full = result is AddReqResult.NO_TOKEN
                break
        if self.preemption_threshold is not None:
            self.requeue(adder.preempt_list)
        if not adder.can_run_list:
            return None
        batch = self.batch_class.init_new(adder.can_run_list, self.pools)
        batch.prepare_for_extend(self.sampling_info_of(batch.reqs))
        self.set_running(adder.can_run_list)
        return batch

    def _update_running_batch(self) -> ScheduleBatch | None:
        """Return the running batch with a slot for the next token of each request. Retract requests until they fit."""
        batch = self.running_batch
        if not batch.reqs:
            return None
        if batch.check_decode_mem():
            self.new_token_ratio.decay()
        elif not self.retract(batch.reqs):
            return None
        batch.prepare_for_decode()
        return batch

    def _new_adder(self, num_rows: int, num_waiting: int) -> PrefillAdder:
        """Return the part that decides which prompts fit into this step."""
        return self.prefill_adder(
            tree_cache=self.tree_cache,
            token_to_kv_pool_allocator=self.pools.token_to_kv_pool_allocator,
            running=self.running_batch.reqs,
            new_token_ratio=self.new_token_ratio.value,
            max_prefill_tokens=self.max_num_batched_tokens,
            max_new_reqs=num_rows,
            num_waiting=num_waiting,
            tracer=self.tracer,
        )

    # --- intake and totals --------------------------------------------------------------------------------------------

    def add_request(self, request: Req) -> None:
        """Queue a request that has passed the checks of intake, with an id that is not in use."""
        self.tracer.emit(RequestAdded.of, request, len(self.waiting_queue))
        if request.priority or request.extra_key is not None:
            self.tracer.emit(RequestOptions, rid=request.rid, priority=request.priority, extra_key=request.extra_key)
        self._num_arrivals += 1
        request.number = self._num_arrivals
        self.requests[request.request_id] = request
        self.waiting_queue.append(request)
        self.tree_cache.prefetch(request)

    @property
    def waiting(self) -> list[Req]:
        return self.waiting_queue

    @property
    def running(self) -> list[Req]:
        return [req for req in self.requests.values() if req.status is RequestStatus.RUNNING]

    def counters(self) -> dict[str, Any]:
        """Return the totals that `EngineStats` has besides m1's, by field."""
        return {
            "num_cached_tokens": self.num_cached_tokens,
            "num_evicted_tokens": self.tree_cache.num_evicted_tokens,
            "num_retractions": self.num_retractions,
            "num_host_hit_tokens": self.tree_cache.num_loaded_tokens,
            "num_disk_hit_tokens": self.tree_cache.num_disk_hit_tokens,
            "num_preemptions": self.num_preemptions,
        }

    def stats(self, totals: Mapping[str, Any]) -> EngineStats:
        """Return all totals (those of m1's `EngineStats`, and `counters`), and the state of the cache."""
        allocator, cache = self.pools.token_to_kv_pool_allocator, self.tree_cache
        return self.stats_class(
            **{**totals, **cache.tier_bytes()},
            max_total_tokens=allocator.size,
            available_size=allocator.available_size(),
            evictable_size=cache.evictable_size(),
            protected_size=cache.protected_size(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        check_scheduler(self, self.waiting_queue, self.in_batches())

    # --- joining and leaving ------------------------------------------------------------------------------------------

    def in_batches(self) -> list[Req]:
        """Return the running requests that are in a batch, between two steps."""
        batches = [self.running_batch] + ([self.last_batch] if self.last_batch is not None else [])
        return [req for batch in batches for req in batch.reqs if req.status is RequestStatus.RUNNING]

    def merge_last_batch(self) -> None:
        """Move the requests whose prompt ran in the last step into the running batch; drop those that have left."""
        if self.last_batch is not None:
            self.last_batch.filter_batch()
            self.running_batch.merge_batch(self.last_batch)
            self.last_batch = None
        self.running_batch.filter_batch()

    def sampling_info_of(self, reqs: list[Req]) -> SamplingBatchInfo:
        """Return the sampling parameters of these requests as tensors."""
        stop_ids = self.updater.stop_checker.stop_ids
        return SamplingBatchInfo.from_reqs(reqs, vocab_size=self.vocab_size, stop_ids=stop_ids, device=self.device)

    def set_running(self, reqs: Sequence[Req]) -> None:
        """Take requests that have a row now out of the waiting queue, and count what they found in the cache."""
        started = {id(req) for req in reqs}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        for req in reqs:
            req.status = RequestStatus.RUNNING
            self.tree_cache.record_hit(req.last_node, req.rid)
            self.num_cached_tokens += len(req.prefix_indices)
            if not req.num_retractions and not req.num_preemptions:
                req.cached_tokens = len(req.prefix_indices)

    def retract(self, candidates: Sequence[Req]) -> bool:
        """Retract some of `candidates` until the next tokens of the running batch have room; return whether they have.

        A request that does not fit although it is alone ends with an error.
        """
        batch, rows = self.running_batch, self.pools.req_to_token_pool
        self.send_back(retract(batch, candidates, self.preemption, self.new_token_ratio, self.tracer))
        if not batch.reqs:
            return False
        if batch.check_decode_mem():
            return True
        if rows.num_used == 1:  # otherwise another request ends now, and the update frees its KV
            (req,) = batch.reqs
            self.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))
        return False

    def send_back(self, reqs: Iterable[Req]) -> None:
        """Queue running requests again. The policy puts them before all others."""
        for req in reqs:
            if req.req_pool_idx is not None:
                self.tree_cache.cache_finished_req(req, is_insert=False)
            req.num_retractions += 1
            self.num_retractions += 1
            req.status = RequestStatus.PREEMPTED
            self.waiting_queue.append(req)
            self.batch_is_full = False

    # --- preemption by priority ---------------------------------------------------------------------------------------

    def may_preempt(self) -> bool:
        """Return whether a waiting request may take the place of running ones, if that is enough for it."""
        if self.preemption_threshold is None:
            return False
        waiting = [req for req in self.waiting_queue if req.to_finish is None]
        return may_preempt(waiting, self.running_batch.reqs, self.preemption_threshold)

    def preempts_for(self, req: Req, adder: PrefillAdder) -> bool:
        """Preempt running requests if `req` has room only then. Return False if a preempted request comes before it."""
        if self.preemption_threshold is None:
            return True
        if any(victim.priority >= req.priority for victim in adder.preempt_list):
            return False
        if adder.preempt_to_schedule(req, self.preemption_threshold):
            self.batch_is_full = False
        return True

    def requeue(self, victims: Sequence[Req]) -> None:
        """Queue preempted requests again, at their own priority and arrival. Their KV is in the cache."""
        self.take_out(victims)
        self.waiting_queue += victims

    def take_out(self, victims: Sequence[Req]) -> None:
        """Take preempted requests out of the running batch."""
        gone, batch = set(victims), self.running_batch
        batch.filter_batch([i for i, req in enumerate(batch.reqs) if req not in gone])
        for req in victims:
            req.status = RequestStatus.WAITING
        self.num_preemptions += len(victims)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def is_stuck(self) -> bool:
        """Return whether there are requests and none ends: then, after a step without a batch, every step is empty."""
        return bool(self.requests) and all(req.to_finish is None for req in self.requests.values())

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Return the marked ids."""
        known = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        marked = {req.rid: req for req in known if self.updater.mark(req, reason)}
        self.marked |= marked
        return list(marked)

    def finish(self, req: Req) -> None:
        """End a marked request, and free its KV."""
        if req.req_pool_idx is not None:
            self.release(req)
        elif req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self.batch_is_full = False  # the others may have waited for it
        self.leave(req)

    def release(self, req: Req) -> None:
        """Free the row and the KV of a request that ends. The KV goes to the cache, unless the request failed."""
        self.tree_cache.cache_finished_req(req, is_insert=not isinstance(req.to_finish, FinishError))
        self.batch_is_full = False
        self.unreported.append(req.rid)

    def leave(self, req: Req) -> None:
        """Remove a marked request from the unfinished ones."""
        assert req.to_finish is not None
        self.tree_cache.cancel_prefetch(req.rid)
        self.marked.pop(req.rid, None)
        del self.requests[req.rid]
        self.updater.end(req, req.to_finish)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards queues and cache are empty, all memory is free."""
        requests, self.requests = self.requests, {}
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
