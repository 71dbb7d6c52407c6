"""What the messages of a scheduler of blocks must say: `checks.py` for preemption, forks and swaps.

`PagedChecks` reads every message, as m2's does. It compares the running requests of the scheduler and the owners of the
KV manager before and after a decision: the rules must allow the difference.
"""

from collections.abc import Mapping
from typing import Any

from m1_single_request.sampler import SampledTokens
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.testbed.checks import Life, MessageChecks

NOTHING = SchedulerOutput([], [], CachedRequestData(), {}, 0, frozenset(), [], [], [])


class PagedChecks(MessageChecks):
    """Raises AssertionError at the first message that does not say what it must."""

    def __init__(self, scheduler: Any, **limits: int) -> None:
        self.kv = scheduler.kv_manager
        super().__init__(scheduler, **limits)

    # --- a decision ---------------------------------------------------------------------------------------------------

    def scheduled(self, output: Any) -> None:
        """A decision was made; None: there is nothing to compute, and no block to move."""
        is_none, output = output is None, NOTHING if output is None else output
        owned, swapped = self.owned, self.swapped  # before it
        self._look()
        counts = output.num_scheduled_tokens
        full = [*output.scheduled_new_reqs, *output.scheduled_resumed_reqs]
        self._counts_are_right(output, [data.req_id for data in full])
        if not is_none:
            assert output.finished_req_ids == self.unannounced, "each end is announced in the next decision, and once"
            self.unannounced = set()
        self.note_failures_for_memory()
        joined = self._queues_moved_by_the_rules()
        for data in output.scheduled_new_reqs:
            self._new(data, counts[data.req_id])
        for data in output.scheduled_resumed_reqs:
            self._resumed(data, counts[data.req_id], was_swapped=data.req_id in swapped)
        self._cached_requests(output.scheduled_cached_reqs, counts)
        self._who_runs_has_a_reason_to_wait(output, joined)
        self._swaps_are_right(output, owned, swapped)
        self._one_block_each_was_kept(owned, joined)
        self._memory_is_sound()

    def nothing_is_freed(self) -> None:
        """Between a decision and its update the memory stays as it is, whatever happens."""
        now = (self.kv.owned(), self.kv.swapped(), self.kv.num_free)
        assert now == (self.owned, self.swapped, self.num_free)

    def _counts_are_right(self, output: Any, full: list[str]) -> None:
        counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        ids = full + cached.req_ids
        assert len(set(ids)) == len(ids) <= self.max_num_seqs and sorted(ids) == sorted(counts)
        assert sum(counts.values()) == output.total_num_scheduled_tokens
        alone = len(ids) == 1 and ids[0] in [data.req_id for data in output.scheduled_resumed_reqs]
        assert output.total_num_scheduled_tokens <= self.max_num_batched_tokens or alone
        has_moves = bool(output.blocks_to_swap_in or output.blocks_to_swap_out)
        assert (output is NOTHING) == (not ids and not has_moves)

    def fits_alone(self, num_tokens: int) -> bool:
        return self.kv.blocks_for(num_tokens) <= self.kv.num_blocks

    def _queues_moved_by_the_rules(self) -> list[str]:
        """Compare who runs with who ran; returns who joined."""
        before, now = list(self.running), self._running_ids()
        queue = [rid for rid in self._queue() if not self.lives[rid].marked]
        gone, joined = [rid for rid in before if rid not in now], [rid for rid in now if rid not in before]
        self.running = {rid: self.lives[rid] for rid in now}
        for life in self.running.values():
            life.ran = True
        for rid in gone:
            self.lives[rid].is_known = False
        assert now == [rid for rid in before if rid in now] + joined, "in order of admission"
        assert not (gone and joined), "a request is admitted in a step that preempted"
        assert joined == queue[: len(joined)], f"{joined} joined, but the queue was {queue}"
        assert not any(self.lives[rid].marked for rid in gone + joined)
        return joined

    def _new(self, data: Any, num_scheduled: int) -> None:
        """The full data of a request that has said nothing yet."""
        life, request = self.running[data.req_id], self.running[data.req_id].request
        assert not life.is_known and not life.said and not life.marked
        assert (data.prompt_token_ids, data.seed) == (life.prompt, request.seed)
        assert data.sampling_params is request.sampling_params
        assert data.stop_token_ids == self.scheduler.updater.stop_checker.stop_ids(request.sequence)
        start = data.num_computed_tokens
        assert start + num_scheduled == len(life.prompt) and start in (0, len(life.prompt) - 1)
        if start:
            assert request.parent_id is not None and request.sampling_params.prompt_logprobs is None
        self._knows(life, data.block_ids)

    def _resumed(self, data: Any, num_scheduled: int, *, was_swapped: bool) -> None:
        """What was said, and the blocks, of a request that comes back."""
        life = self.running[data.req_id]
        assert not life.is_known and not life.marked
        assert data.output_token_ids == life.said != []
        start = data.num_computed_tokens
        assert start + num_scheduled == life.num_tokens
        assert start == life.num_kv if was_swapped or start else start == 0
        self._knows(life, data.block_ids)

    def _got_blocks(self, life: Life, start: int, blocks: list[int]) -> None:
        """In place of one that it shared, perhaps."""
        assert len(blocks) <= 1
        life.blocks[start // self.kv.block_size :] = blocks or life.blocks[start // self.kv.block_size :]

    def _knows(self, life: Life, block_ids: list[int]) -> None:
        assert block_ids == self.owned[life.request.request_id]
        life.blocks, life.is_known = list(block_ids), True

    def _who_runs_has_a_reason_to_wait(self, output: Any, joined: list[str]) -> None:
        """Each running request has a token, unless the budget is used up, a sibling comes first, or others end."""
        counts = output.num_scheduled_tokens
        others_end = any(life.marked for life in self.running.values())
        for rid, life in self.running.items():
            if rid in counts or life.marked:
                continue
            siblings = [one for one in counts if self.lives[one].request.parent_id == life.request.parent_id]
            if rid in joined and life.request.parent_id is not None and not life.said and siblings:
                continue
            assert output.total_num_scheduled_tokens >= self.max_num_batched_tokens or others_end, f"{rid} is left out"

    def _swaps_are_right(self, output: Any, owned: Mapping[str, list[int]], swapped: Mapping[str, list[int]]) -> None:
        came = {rid: ids for rid, ids in swapped.items() if rid in self.running}
        went = {rid: ids for rid, ids in self.swapped.items() if rid not in swapped}
        swap_in = [pair for rid, ids in came.items() for pair in zip(ids, self.owned[rid], strict=False)]
        swap_out = [pair for rid, ids in went.items() for pair in zip(owned[rid], ids, strict=True)]
        assert sorted(output.blocks_to_swap_in) == sorted(swap_in)
        assert sorted(output.blocks_to_swap_out) == sorted(swap_out)

    def _one_block_each_was_kept(self, owned: Mapping[str, list[int]], joined: list[str]) -> None:
        """When the last one joined; since then the others may have taken theirs."""
        if not joined or len(self.running) == 1:
            return
        taken = sum(len(set(ids).difference(owned[rid])) for rid, ids in self.owned.items() if rid not in joined)
        assert self.num_free + taken >= len(self.running)

    # --- a result -----------------------------------------------------------------------------------------------------

    def nothing_is_left(self) -> None:
        """After a drain."""
        super().nothing_is_left()
        assert not self.kv.swapped() and self.kv.num_free == self.kv.num_blocks

    def _who_was_sent_back(self, sampled: Mapping[str, SampledTokens]) -> None:
        now = self._running_ids()
        for rid in [rid for rid in self.running if rid not in now]:
            life = self.running.pop(rid)
            assert not sampled or not life.said, f"{rid} was sent back after a step that went well"
            life.is_known = False
        assert list(self.running) == now

    # --- state --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self.owned, self.swapped, self.num_free = self.kv.owned(), self.kv.swapped(), self.kv.num_free

    def _running_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def _queue(self) -> list[str]:
        """Who waits, in the order in which they must be let in: who ran before, then the others; by arrival."""
        waiting = {rid: life for rid, life in self.lives.items() if rid not in self.running}
        return sorted(waiting, key=lambda rid: (not waiting[rid].ran, waiting[rid].number))

    def _memory_is_sound(self) -> None:
        running = self._running_ids()
        assert len(running) <= self.max_num_seqs
        assert self.owned.keys() == set(running), "each running request owns memory, and no other"
        assert not self.swapped.keys() & set(running)
        holders: dict[int, set[Any]] = {}
        for rid, block_ids in self.owned.items():
            assert len(set(block_ids)) == len(block_ids) and 0 not in block_ids
            family = self.lives[rid].request.parent_id or (rid,)
            for block_id in block_ids:
                holders.setdefault(block_id, set()).add(family)
        assert all(len(families) == 1 for families in holders.values()), "only siblings share blocks"
        assert self.num_free + len(holders) == self.kv.num_blocks, "free and owned blocks together are all"
