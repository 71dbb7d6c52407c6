"""Scheduling before the last result is known, and booking a result after the next step was launched.

Step N + 1 is scheduled as if every request of step N had got a token that ends nothing (`schedule`); its requests are
changed for that call alone. When the tokens of step N are there, it may turn out that a request has ended, by a stop
token or an error, while step N + 1 runs. Then its output is reported at once; its row and its slots stay until step
N + 1 has arrived, whose token for it is dropped. An end by length is foreseen: such a request is not in step N + 1. A
request that was retracted or preempted while its token was on its way gets that token when it arrives, and computes its
KV again.
SGLang: `process_batch_result` in `event_loop_overlap`; vLLM: `num_output_placeholders` of its `AsyncScheduler`.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from m1_single_request.errors import PartError
from m1_single_request.request import BaseFinishReason, FinishError
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.events import Audit
from m4_radix_cache.invariants import check_memory, pages_of
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import ScheduleBatch as PlainScheduleBatch
from m4_radix_cache.schedule_policy import Order, SchedulePolicy, checked
from m5_chunked_prefill_spec.events import Batch, RolledBack
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.result_processor import commit_run_simply
from m5_chunked_prefill_spec.schedule_batch import Run, ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd.disaggregation.first_token import FirstTokenOnly
from m6_multimodal_pd.overlap.future_map import FutureMap
from m6_multimodal_pd.overlap.launched_step import LaunchedStep
from m6_multimodal_pd.request import Req as VisionReq

PLACEHOLDER = -1


class BehindPrompts:
    """The policy, for which a step in flight completes its prompts in the step that is scheduled."""

    def __init__(self, policy: Any, in_flight: LaunchedStep) -> None:
        self.policy, batch = policy, in_flight.batch
        prompts = [req for place, req, _ in in_flight.rows() if place < batch.num_prompts]
        self.prompts = [req for req in prompts if req is not batch.chunked_req]

    def calc_priority(self, waiting: list[Req], prefilling: Sequence[Req]) -> Order:
        """Return the order of this round."""
        return checked(self.policy.calc_priority(waiting, [*self.prompts, *prefilling]), self.policy, waiting)


class LateResults:
    """The two verbs of a scheduler, for steps whose results come late. The decisions are the scheduler's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ended: list[Req] = []
        """Requests that have ended, and have a row until the step in flight has arrived."""
        self._marked_early: dict[str, BaseFinishReason] = {}
        """By request id: errors that were found while the next step was scheduled, before a token that is in flight."""

    def reset(self) -> None:
        """Forget all requests, whose rows are freed elsewhere."""
        self.ended, self._marked_early = [], {}

    # --- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self, in_flight: LaunchedStep | None) -> ScheduleBatch | None:
        """Choose the batch of the next step, before the result of the one in flight is known; None if there is nothing
        to launch."""
        scheduler = self.scheduler
        scheduler.tree_cache.begin_step()
        scheduler.merge_last_batch()
        running = scheduler.running_batch
        running.filter_batch([i for i, req in enumerate(running.reqs) if not self._ends_with(in_flight, req)])
        before = set(scheduler.marked)
        with self._as_if_arrived(in_flight):
            batch = scheduler.cur_batch = scheduler.get_next_batch_to_run()
        if in_flight is not None:
            found = [req for rid, req in scheduler.marked.items() if rid not in before]
            self._postpone([req for req in found if isinstance(req.to_finish, FinishError)])
        assert batch is None or isinstance(batch, ScheduleBatch)
        is_idle = batch is None and in_flight is None
        if is_idle and not scheduler.tree_cache.wait_for_disk() and scheduler.is_stuck():
            raise PartError(scheduler.nothing_runs)
        if batch is not None:
            scheduler.tracer.emit(self._batch_event, batch, in_flight)
            scheduler.unreported = []
        return batch

    def _postpone(self, reqs: Sequence[Req]) -> None:
        """Take marks back until the token has come that these requests have in flight."""
        for req in reqs:
            assert req.to_finish is not None
            self._marked_early[req.rid], req.to_finish = req.to_finish, None
            del self.scheduler.marked[req.rid]

    def _batch_event(self, batch: ScheduleBatch, in_flight: LaunchedStep | None) -> Batch:
        """Return the event of a batch. A request that ends with the step in flight waits for nothing."""
        event = self.scheduler.batch_event.of(batch, self.scheduler)
        assert isinstance(event, Batch)
        ending = sum(self._ends_with(in_flight, req) for req in self.scheduler.running)
        return replace(event, num_running=event.num_running - ending)

    def launched(self, number: int, batch: ScheduleBatch) -> LaunchedStep:
        """Return the step of a batch, and let the batch go on with placeholders for its tokens."""
        step = LaunchedStep(number, copy.copy(batch))
        batch.output_ids = FutureMap.placeholders(batch.req_pool_indices)
        scheduler = self.scheduler
        scheduler.last_batch = None if batch is scheduler.running_batch else batch  # it joins the running batch next
        return step

    @contextmanager
    def _as_if_arrived(self, in_flight: LaunchedStep | None) -> Iterator[None]:
        """In the block, the requests of a step are as if each had got its KV and its tokens, for all of its drafts.

        Only its prompts are not in the cache yet, so requests that begin alike wait for them.
        """
        before, scheduler = [], self.scheduler
        policy: Any = scheduler.policy
        if in_flight is not None and in_flight.batch.num_prompts:
            scheduler.policy = cast(SchedulePolicy, BehindPrompts(policy, in_flight))
        rows = (
            [] if in_flight is None else [(r, end, in_flight.num_tokens(place)) for place, r, end in in_flight.rows()]
        )
        for req, end, num_tokens in rows:
            sequence = req.sequence
            before.append((req, num_tokens, sequence.num_computed_tokens))
            req.num_in_flight = end - sequence.num_computed_tokens
            sequence.num_computed_tokens = end
            sequence.output_token_ids.extend([PLACEHOLDER] * num_tokens)
            if not num_tokens:  # the next piece of its prompt goes on from here
                assert req.req_pool_idx is not None
                req.prefix_indices = scheduler.pools.req_to_token_pool.read(req.req_pool_idx, 0, end)
        try:
            yield
        finally:
            scheduler.policy = policy
            for req, num_tokens, num_computed in before:
                cast(VisionReq, req).take_back(num_tokens)
                req.num_in_flight = 0
                if req.req_pool_idx is not None:  # it was not retracted
                    req.sequence.num_computed_tokens = num_computed

    # --- between the verbs --------------------------------------------------------------------------------------------

    def expect(
        self, step: LaunchedStep, scheduled: ScheduleBatch, newest_tokens: Callable[[np.ndarray], Tensor]
    ) -> None:
        """Count the tokens of a decode step in the living rows before it has arrived: one for each of its requests.

        `newest_tokens`: of some rows, as the device has them.
        """
        step.is_expected = True
        in_step = set(map(id, step.batch.reqs))
        for batch, info in self.living(scheduled):
            is_in = np.array([id(req) in in_step for req in batch.reqs])
            tokens = () if info.seen is None else newest_tokens(batch.req_pool_indices[is_in])
            info.advance(tokens, is_in.astype(np.int64))

    def living(self, scheduled: ScheduleBatch | None) -> list[tuple[PlainScheduleBatch, SamplingBatchInfo]]:
        """Return the batches that go on, with the rows for the sampler."""
        scheduler = self.scheduler
        batches = {id(batch): batch for batch in (scheduler.running_batch, scheduler.last_batch, scheduled) if batch}
        return [(each, each.sampling_info) for each in batches.values() if each.reqs and each.sampling_info is not None]

    def arrived(self, step: LaunchedStep, output: ModelRunnerOutput | None, scheduled: ScheduleBatch | None) -> None:
        """Add the tokens of a step to the living rows, and its prompts to the cache, before the next step is launched:
        so no page that it reads can be freed as a duplicate."""
        if output is None or step.is_expected:
            return
        scheduler = self.scheduler
        living = self.living(scheduled)
        for batch, info in living:
            advance(batch, info, output)
        if step.batch.num_prompts or step.batch.drafts:
            tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
            for place, req, end in step.rows():
                rid = step.batch.rids[place]
                if place < step.batch.num_prompts and req.to_finish is None and rid not in output.errors:
                    req.kv_committed_len = end
                    scheduler.tree_cache.cache_unfinished_req(req)
                elif rid in tokens and len(tokens[rid]) < step.num_tokens(place):
                    num_wrong = step.num_tokens(place) - len(tokens[rid])
                    self._take_back(req, num_wrong, [batch for batch, _ in living], scheduled)

    def _take_back(
        self, req: Req, num_tokens: int, living: Iterable[PlainScheduleBatch], scheduled: ScheduleBatch | None
    ) -> None:
        """Take back the slots of wrong drafts: the request's next tokens, which are scheduled behind them, move up."""
        pools, row = self.scheduler.pools, req.req_pool_idx
        assert row is not None
        rows, allocator = cast(ReqToTokenPool, pools.req_to_token_pool), pools.token_to_kv_pool_allocator
        for batch in living:
            if req not in batch.reqs:
                continue
            place, count = batch.reqs.index(req), 0
            batch.seq_lens = batch.seq_lens.copy()
            batch.seq_lens[place] -= num_tokens
            end = int(batch.seq_lens[place])
            if batch is scheduled:
                count, start = int(scheduled.new_lens[place]), int(scheduled.new_lens[:place].sum())
                batch.out_cache_loc = batch.out_cache_loc.copy()
                batch.out_cache_loc[start : start + count] = rows.read(row, end - count, end)
            allocator.free(rows.truncate(row, end, page_size=allocator.page_size))
            self.scheduler.tracer.emit(RolledBack, rid=req.rid, num_tokens=num_tokens, committed=end - count)

    # --- update -------------------------------------------------------------------------------------------------------

    def update(
        self, step: LaunchedStep | None, output: ModelRunnerOutput | None, ahead: LaunchedStep | None
    ) -> list[Req]:
        """Book a step: append tokens, end finished requests. Return the changed requests.

        `ahead`: the step that is in flight now. `output` is None if the step failed.
        """
        scheduler = self.scheduler
        for req in self.ended:  # the step that has run them in vain is there
            scheduler.release(req)
        self.ended = []
        marked = list(scheduler.marked.values())
        changed: list[Req] = []
        if step is not None and output is not None:
            changed = self._commit(step, output)
        settled = {req.rid for req in changed}
        changed += [req for req in marked if req.rid not in settled]
        for req in [req for req in changed if req.to_finish is not None]:
            if ahead is not None and req.req_pool_idx is not None and ahead.end(req):
                scheduler.leave(req)
                self.ended.append(req)
                if req is scheduler.chunked_req:
                    scheduler.prompts.chunked_req = None  # it has a row, which a retraction must not free
            else:
                scheduler.finish(req)
        for rid, reason in self._marked_early.items():
            scheduler.finish_requests([rid], reason)  # unless its token has ended it
        self._marked_early = {}
        if not scheduler.requests:
            scheduler.new_token_ratio.reset()
        if scheduler.pools.debug:
            scheduler.tracer.emit(Audit.of, scheduler, lambda running, pools: pages_of([*running, *self.ended], pools))
        return changed

    def nothing_follows(self, step: LaunchedStep) -> bool:
        """Return whether no request can be launched after this step, whatever its result is."""
        scheduler = self.scheduler
        if scheduler.waiting_queue:
            return False
        return all(req.to_finish is not None or self._ends_with(step, req) for req in scheduler.running)

    def check_invariants(self, in_flight: LaunchedStep | None) -> None:
        """Raise AssertionError if requests and memory contradict each other, between two calls."""
        scheduler = self.scheduler
        with_rows = [req for req in scheduler.requests.values() if req.req_pool_idx is not None]
        check_memory(with_rows + self.ended, scheduler.pools)
        flying = {} if in_flight is None else {req.rid: end for _, req, end in in_flight.rows()}
        for req in scheduler.running:
            assert req.kv_allocated_len == flying.get(req.rid, req.kv_committed_len), req.rid
            assert PLACEHOLDER not in req.output_ids, req.rid
            assert req.key.token_ids(len(req.origin_input_ids), len(req.key)) == list(req.output_ids), req.rid
        assert in_flight is not None or not self.ended

    def _ends_with(self, step: LaunchedStep | None, req: Req) -> bool:
        """Return whether a token of this step ends a request by its length. A stop checker of the user's may have other
        rules; then no end is foreseen."""
        num_tokens = len(req.output_ids) + 1
        if num_tokens < req.max_new_tokens:  # which may be less than what was asked for, never more
            return False
        if step is None or req not in step.batch.reqs or not step.num_tokens(step.batch.reqs.index(req)):
            return False
        stop_checker = self.scheduler.updater.stop_checker
        if isinstance(stop_checker, FirstTokenOnly):
            return True
        if type(stop_checker).check is not StopChecker.check:
            return False
        max_tokens, max_len = req.sampling_params.max_tokens, stop_checker.max_model_len
        return num_tokens >= min(max_tokens, max_len - len(req.origin_input_ids))

    def _commit(self, step: LaunchedStep, output: ModelRunnerOutput) -> list[Req]:
        """Give the requests of a step their tokens. Return those with a new one."""
        batch, updater = step.batch, self.scheduler.updater
        places = {rid: place for place, rid in enumerate(batch.rids)}
        runs = [
            Run(places[rid], batch.reqs[places[rid]], token_ids, logprobs)
            for rid, token_ids, logprobs in zip(output.req_ids, output.sampled_token_ids, output.logprobs, strict=True)
        ]
        # a prompt's KV is committed already (`arrived`), and a retracted request has none
        decodes = [run for run in runs if run.place >= batch.num_prompts and run.req.req_pool_idx is not None]
        others = [run for run in runs if run.place < batch.num_prompts or run.req.req_pool_idx is None]
        if not batch.drafts:
            left = updater.commit_simply([run.req for run in decodes], [run.token_ids[0] for run in decodes])
            decodes = [decodes[i] for i in left]
        for run, num_new_kv in [*((run, 1) for run in decodes), *((run, 0) for run in others)]:
            req = run.req
            if req.to_finish is None:
                self.scheduler.results.verified(run, batch, output)
                of_prompt = output.prompt_logprobs.get(req.rid)
                sampled = SampledTokens(tuple(run.token_ids), tuple(run.logprobs), of_prompt)
                if not num_new_kv or not commit_run_simply(updater, req, run.token_ids):
                    updater.commit(req, sampled, num_new_kv=num_new_kv)
        chunked = batch.chunked_req
        if chunked is not None and (piece := output.prompt_logprobs.get(chunked.rid)) is not None:
            chunked.sequence.add_prompt_logprobs(piece)
        return [run.req for run in runs if not run.req.is_finished]


def advance(batch: PlainScheduleBatch, sampling_info: SamplingBatchInfo, output: ModelRunnerOutput) -> None:
    """Add the tokens of an earlier step to the rows of a batch."""
    if output.req_ids == batch.rids and all(len(run) == 1 for run in output.sampled_token_ids):
        sampling_info.advance([run[0] for run in output.sampled_token_ids], 1)
        return
    newest = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    runs = [newest.get(rid, []) for rid in batch.rids]
    counts = np.array([len(run) for run in runs], dtype=np.int64)
    sampling_info.advance([token_id for run in runs for token_id in run], counts)
