"""The contents of a step: the two schedules, to be read side by side, and the two batches that they ask for.

In m4 a step ran prompts or decodes, and a running request waited while prompts kept coming. Here both share a step and
its token budget. The schedules differ in the order alone:

    decode_first     | d d d d d | drafts | piece of a prompt ................ |   no running request waits
    prefill_first    | piece of a prompt ..................................... |   then, without prompts, | d d d d d |

A prompt that was cut continues before other prompts start. vLLM V1 schedules running requests first
(`v1/core/sched/scheduler.py`); SGLang runs prompts first, and mixes with `enable_mixed_chunk`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m1_single_request.request import FinishError
from m4_radix_cache.events import Matched
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown
from m4_radix_cache.schedule_policy import checked
from m4_radix_cache.scheduler import Scheduler
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.speculative.proposer import InvalidDraftsError
from m5_chunked_prefill_spec.speculative.speculation import Speculation

LEAST_CHUNK = 16
"""Prompt tokens that a step takes whatever the target: every prompt must end."""
MAX_PASSED_OVER = 32
"""After so many steps that started a newer request, no newer one starts before a waiting request."""


class DecodeFirst:
    """Every running request gets a token; drafts and prompts share the rest of the budget, to the last token.

    While a prompt waits, drafts get at most half of the rest: they may be wrong, the tokens of a prompt never are.
    """

    def __init__(self, *, target_gap_ms: float | None = None, cost_table: CostTable | None = None) -> None:
        """`target_gap_ms`: limits the pieces of prompts so that a step takes no longer, according to the table."""
        self.target_gap_ms, self.cost_table = target_gap_ms, cost_table

    def compose(self, work: "Work") -> ScheduleBatch | None:
        """Return the batch of this step; None if no request can run."""
        left = work.max_num_batched_tokens - work.num_running
        if work.wants_prefill and work.may_preempt:
            return self._prompts_before_decodes(work, left)
        decodes = work.update_running_batch(left // 2 if work.wants_prefill else left)
        if decodes is None:
            return work.get_new_batch_prefill(work.max_num_batched_tokens)
        if not work.wants_prefill:
            return decodes
        left = work.max_num_batched_tokens - int(decodes.new_lens.sum())
        prompts = work.get_new_batch_prefill(*self._limit(work, left, decodes.new_lens, decodes.seq_lens))
        return decodes if prompts is None else work.mix(prompts, decodes)

    def _prompts_before_decodes(self, work: "Work", left: int) -> ScheduleBatch | None:
        """Return the batch of a step in which a prompt may preempt running requests: before these take new slots."""
        lens = work.running_lens
        prompts = work.get_new_batch_prefill(*self._limit(work, left, np.ones_like(lens), lens))
        used = 0 if prompts is None else int(prompts.new_lens.sum())
        decodes = work.update_running_batch(work.max_num_batched_tokens - used - work.num_running)
        return prompts or decodes if prompts is None or decodes is None else work.mix(prompts, decodes)

    def _limit(self, work: "Work", most: int, new_lens: np.ndarray, seq_lens: np.ndarray) -> tuple[int, str]:
        """Return how many of `most` prompt tokens may run beside decodes of these lengths, and the limit behind it."""
        if self.target_gap_ms is None or self.cost_table is None:
            return most, "max_num_batched_tokens"
        largest = self.cost_table.largest(
            self.target_gap_ms,
            most,
            others=int(new_lens.sum()),
            decode_context=int((new_lens * seq_lens).sum()),
            start=work.prefill_start,
        )
        fitting = max(largest, min(LEAST_CHUNK, most))
        return fitting, "max_num_batched_tokens" if fitting == most else "target_gap_ms"


class PrefillFirst:
    """Prompts alone, as long as there are any; the running requests wait for them."""

    def compose(self, work: "Work") -> ScheduleBatch | None:
        """Return the batch of this step; None if no request can run."""
        budget = work.max_num_batched_tokens
        return work.get_new_batch_prefill(budget) or work.update_running_batch(budget - work.num_running)


class PromptState:
    """State of prompts that is kept from step to step.

    At most one prompt is in pieces at any time: `chunked_req`. It has a row, and KV for a part of its prompt; after
    each piece but the last, the next round takes it out of the batch that ran (`ScheduleBatch.filter_batch`).
    """

    def __init__(self) -> None:
        self.chunked_req: Req | None = None
        self.passed_over = Counter[str]()  # by id of a waiting request: steps that started a newer one

    def check_chunked(self) -> None:
        """Forget the request in pieces if it has ended or was retracted."""
        if self.chunked_req is not None and self.chunked_req.req_pool_idx is None:
            self.chunked_req = None

    def count_passed_over(self, new: Sequence[Req], waiting: Sequence[Req]) -> None:
        """Count for each waiting request that a newer one of `new` has started; forget those that have started."""
        newest = max((req.number for req in new), default=0)
        self.passed_over.update(req.rid for req in waiting if req.number < newest)
        for req in new:
            self.passed_over.pop(req.rid, None)


class Work:
    """The batches that a composer may request in one step, each once, and the numbers to decide by.

    To request a batch changes the scheduler's queues and memory.
    """

    def __init__(
        self, scheduler: Scheduler, prompts: PromptState, *, speculation: Speculation, cuts: Mapping[str, Any]
    ) -> None:
        """`cuts`: where prompts may be cut, as keywords of the `PrefillAdder`."""
        self.scheduler, self.prompts, self.speculation, self.cuts = scheduler, prompts, speculation, cuts
        self.max_num_batched_tokens = scheduler.max_num_batched_tokens
        """The token budget of the step."""
        self.wants_prefill = prompts.chunked_req is not None or bool(scheduler.waiting_queue)
        """Whether a prompt waits, or is in pieces."""
        self._has_retracted = False  # then no request is admitted

    # --- requests of a composer ---------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Number of requests that would get a token from `update_running_batch`."""
        return len(self.scheduler.running_batch.reqs)

    @property
    def running_lens(self) -> np.ndarray:
        """Number of tokens of each running request after its next one, int64."""
        lens: np.ndarray = self.scheduler.running_batch.seq_lens + 1
        return lens

    @property
    def may_preempt(self) -> bool:
        """Whether a waiting request may take the place of running ones, if it is admitted before these get slots."""
        return self.scheduler.may_preempt()

    @property
    def prefill_start(self) -> int:
        """Tokens with KV of the prompt that is in pieces; 0 if none is."""
        chunked = self.prompts.chunked_req
        return 0 if chunked is None else chunked.kv_committed_len

    def update_running_batch(self, max_draft_tokens: int) -> ScheduleBatch | None:
        """Return the running batch with the next token of each request, and at most `max_draft_tokens` drafts in all:
        all of these, or none if they do not all have room. Retract requests until the next tokens have room, never for
        a draft. None if no request can go on."""
        scheduler, batch = self.scheduler, self.scheduler.running_batch
        assert isinstance(batch, ScheduleBatch)
        if not batch.reqs:
            return None
        if batch.check_decode_mem():
            scheduler.new_token_ratio.decay()
        elif not self._retract(batch):
            return None
        drafts = self._drafts(batch.reqs, max_draft_tokens) if self.speculation.proposer is not None else []
        batch.prepare_for_decode(drafts if drafts and batch.has_room_for(drafts) else [])
        return batch

    def get_new_batch_prefill(self, num_tokens: int, bound_by: str = "max_num_batched_tokens") -> ScheduleBatch | None:
        """Return at most `num_tokens` tokens of prompts: the next piece of the prompt that was cut, then waiting
        requests in the order of the policy, as long as rows and memory allow. None if none fits.

        `bound_by`: the name of the limit behind `num_tokens`, for the trace.
        """
        scheduler, chunked = self.scheduler, self.prompts.chunked_req
        num_rows = scheduler.pools.req_to_token_pool.available_size()
        cache = scheduler.tree_cache
        waiting: list[Req] = []
        is_full = scheduler.batch_is_full or not num_rows
        if not self._has_retracted and (not is_full or scheduler.may_preempt()):
            waiting = [req for req in scheduler.waiting_queue if req.to_finish is None and not cache.is_waiting(req)]
        if chunked is not None and chunked.to_finish is not None:  # it ends now, and the update frees its KV
            chunked, waiting = None, []
        if num_tokens < 1 or (chunked is None and not waiting):
            return None
        adder: PrefillAdder = scheduler.prefill_adder(
            tree_cache=scheduler.tree_cache,
            token_to_kv_pool_allocator=scheduler.pools.token_to_kv_pool_allocator,
            running=scheduler.running_batch.reqs,
            new_token_ratio=scheduler.new_token_ratio.value,
            max_prefill_tokens=num_tokens,
            max_new_reqs=num_rows + (chunked is not None),
            num_waiting=len(waiting),
            has_whole_step=num_tokens == self.max_num_batched_tokens,
            bound_by=bound_by,
            tracer=scheduler.tracer,
            **self.cuts,
        )
        if chunked is None or self._add_chunked(adder, chunked):
            self._add_waiting(adder, waiting)
        if scheduler.preemption_threshold is not None:
            scheduler.requeue(adder.preempt_list)
        return self._start(adder) if adder.can_run_list else None

    def mix(self, prompts: ScheduleBatch, decodes: ScheduleBatch) -> ScheduleBatch:
        """Move the decodes of the running batch behind the prompts, and return that batch."""
        prompts.mix_with_running(decodes)
        self.scheduler.running_batch = self.scheduler.batch_class([], self.scheduler.pools)
        return prompts

    # --- tokens for running requests ----------------------------------------------------------------------------------

    def _retract(self, batch: ScheduleBatch) -> bool:
        """Retract requests, the one in pieces included, until the batch has room; return whether it has."""
        self._has_retracted = True
        chunked = self.prompts.chunked_req
        has_room = self.scheduler.retract([*batch.reqs, *([chunked] if chunked is not None else [])])
        self.prompts.check_chunked()
        return has_room

    def _drafts(self, reqs: Sequence[Any], most: int) -> list[list[int]]:
        """Return the drafts of this step. A request with an invalid draft ends; the others go on without drafts for a
        step."""
        try:
            drafts: list[list[int]] = self.speculation.propose(reqs, most)
        except InvalidDraftsError as invalid:
            for rid, error in invalid.errors.items():
                self.scheduler.finish_requests([rid], FinishError(error))
            return []
        return drafts

    # --- tokens of prompts --------------------------------------------------------------------------------------------

    def _add_chunked(self, adder: PrefillAdder, chunked: Req) -> bool:
        """Admit the next piece of the prompt that was cut; return whether other prompts may follow."""
        chunked.extend_input_len = len(chunked.fill_ids) - len(chunked.prefix_indices)
        result = adder.add_chunked_req(chunked)
        is_alone = not adder.can_run_list and self.scheduler.pools.req_to_token_pool.num_used == 1
        if result is AddReqResult.NO_TOKEN and is_alone:
            self._give_up(chunked)
        return result is AddReqResult.CONTINUE

    def _add_waiting(self, adder: PrefillAdder, waiting: Sequence[Req]) -> None:
        """Admit waiting requests in the order of the policy, until one does not fit."""
        if not waiting:
            return
        scheduler = self.scheduler
        policy: Any = scheduler.policy  # m5's, which m4's scheduler has in place of its own
        order = checked(policy.calc_priority(list(waiting), adder.can_run_list), policy, waiting)
        for req in self._fairly(order.ready):
            req.init_next_round_input(scheduler.tree_cache)
            scheduler.tracer.emit(Matched.of, req)
            if not scheduler.preempts_for(req, adder):
                return
            result = adder.add_one_req(req)
            is_alone = not adder.can_run_list and not scheduler.pools.req_to_token_pool.num_used
            if result is AddReqResult.NO_TOKEN and is_alone:
                self._give_up(req)
            elif result is not AddReqResult.CONTINUE:
                scheduler.batch_is_full = result is AddReqResult.NO_TOKEN
                return

    def _give_up(self, req: Req) -> None:
        """End a request that does not fit although it is alone."""
        self.scheduler.finish_requests([req.rid], FinishError(outgrown(req, self.scheduler.pools)))

    def _fairly(self, ready: Sequence[Req]) -> list[Req]:
        """Return the requests in the policy's order, but those that were passed over too often first, oldest first.
        Only retracted requests stay before them."""
        passed_over = self.prompts.passed_over
        late = [r for r in ready if passed_over.get(r.rid, 0) >= MAX_PASSED_OVER and not r.is_retracted]
        if not late:
            return list(ready)
        first = [req for req in ready if req.is_retracted] + sorted(late, key=lambda req: req.number)
        return [*first, *(req for req in ready if req not in first)]

    def _start(self, adder: PrefillAdder) -> ScheduleBatch:
        """Return a batch of the admitted requests."""
        scheduler, reqs = self.scheduler, adder.can_run_list
        new = [req for req in reqs if req.req_pool_idx is None]
        batch = scheduler.batch_class.init_new(reqs, scheduler.pools)
        assert isinstance(batch, ScheduleBatch)
        batch.prepare_for_extend(scheduler.sampling_info_of(batch.reqs))
        self.prompts.chunked_req = adder.new_chunked_req
        scheduler.set_running(new)
        self.prompts.count_passed_over(new, scheduler.waiting_queue)
        return batch
