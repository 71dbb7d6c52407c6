"""What the messages of a scheduler of blocks must say: `checks.py` for whoever preempts, forks and swaps.

`PagedChecks` hears of everything that comes in and reads everything that goes out, as m2's does. It asks the scheduler
who runs and the KV manager who owns what, before and after; what changed in between must be what the rules allow.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m1_single_request.request import FinishError
from m1_single_request.sampler import SampledTokens
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.testbed.fakes import answer


@dataclass
class Life:
    """What is known of a request that has not ended."""

    request: Request
    number: int
    """Its place in the order of arrival."""
    expected: tuple[int, ...]
    """All that it will say if nothing comes between."""
    said: list[int] = field(default_factory=list)
    is_known: bool = False
    """Whether the runner knows its tokens and blocks, so that differences may be sent."""
    ran: bool = False
    """Whether it is or was among the running ones: if it waits, it was preempted."""
    marked: bool = False
    """Aborted, failed or given up: it ends at the next update."""
    blocks: list[int] = field(default_factory=list)
    """Its block table, as the messages tell it."""

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.said)

    @property
    def num_kv(self) -> int:
        """Tokens that certainly have KV between two steps, if it runs."""
        return self.num_tokens - 1 if self.said else 0


NOTHING = SchedulerOutput([], [], CachedRequestData(), {}, 0, frozenset(), [], [], [])


class PagedChecks:
    """Raises AssertionError at the first message that does not say what it must."""

    def __init__(self, scheduler: Any, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.kv = scheduler.kv_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.lives: dict[str, Life] = {}  # unfinished ones, in order of arrival
        self.running: dict[str, Life] = {}  # in order of admission
        self.unannounced: set[str] = set()
        self._num_arrivals = 0
        self._look()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """A request arrived."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        most = min(params.max_tokens, self.max_model_len - len(prompt))
        expected = answer(prompt, most, params.stop_token_ids, seed=request.seed)
        self._num_arrivals += 1
        self.lives[request.request_id] = Life(request, self._num_arrivals, expected)

    def marked(self, request_ids: Collection[str], marked: Collection[str]) -> None:
        """Requests were aborted or failed, and `marked` was the scheduler's answer."""
        new = {rid: self.lives[rid] for rid in request_ids if rid in self.lives and not self.lives[rid].marked}
        assert list(marked) == list(new)
        for life in new.values():
            life.marked = True

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
        self._note_who_was_given_up()
        joined = self._queues_moved_by_the_rules()
        for data in output.scheduled_new_reqs:
            self._new(data, counts[data.req_id])
        for data in output.scheduled_resumed_reqs:
            self._resumed(data, counts[data.req_id], was_swapped=data.req_id in swapped)
        self._cached(output.scheduled_cached_reqs, counts)
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

    def _note_who_was_given_up(self) -> None:
        for rid, life in self.lives.items():
            reason = life.request.to_finish
            if reason is not None and not life.marked:
                assert isinstance(reason, FinishError) and isinstance(reason.error, KVCapacityError), (rid, reason)
                assert self.kv.blocks_for(life.num_tokens) > self.kv.num_blocks, f"{rid} could have run alone"
                life.marked = True

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
        assert not (gone and joined), "nobody is admitted in a step that preempted"
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

    def _cached(self, cached: Any, counts: Mapping[str, int]) -> None:
        """The differences of the requests that go on."""
        columns = (cached.new_token_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids)
        for rid, tokens, start, num_output, blocks in zip(cached.req_ids, *columns, strict=True):
            life = self.running[rid]
            assert life.is_known, f"{rid} must be sent in full"
            assert not life.marked, f"{rid} runs although it is to end"
            assert (tokens, start, num_output) == (life.said[-1:], life.num_kv, len(life.said))
            assert counts[rid] == 1 and len(blocks) <= 1
            life.blocks[start // self.kv.block_size :] = blocks or life.blocks[start // self.kv.block_size :]
            assert life.blocks == self.owned[rid]

    def _knows(self, life: Life, block_ids: list[int]) -> None:
        assert block_ids == self.owned[life.request.request_id]
        life.blocks, life.is_known = list(block_ids), True

    def _who_runs_has_a_reason_to_wait(self, output: Any, joined: list[str]) -> None:
        """Whoever runs has a token, unless the budget is used up, its sibling comes first, or others end."""
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

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Request]) -> dict[str, str]:
        """A step was committed. Returns why requests ended in it, by request id."""
        ends = {rid for rid, life in self.lives.items() if life.marked}
        assert len(changed) == len({request.request_id for request in changed})
        assert {request.request_id for request in changed} == ends | sampled.keys()
        for rid in sampled.keys() - ends:
            life = self.running[rid]
            life.said += sampled[rid].token_ids
            assert tuple(life.said) == life.expected[: len(life.said)], f"{rid} says something wrong"
            if len(life.said) == len(life.expected):
                ends.add(rid)
        for rid, life in self.lives.items():
            assert life.request.sequence.output_token_ids == life.said
            assert life.request.is_finished == (rid in ends)
        reasons = {request.request_id: request.finish_reason for request in changed if request.is_finished}
        assert reasons.keys() == ends
        for rid in ends:
            del self.lives[rid]
            self.running.pop(rid, None)
        self.unannounced |= ends
        self._who_was_sent_back(sampled)
        self._queues_are_right()
        self._look()
        self._memory_is_sound()
        return {rid: reason.reason for rid, reason in reasons.items() if reason is not None}

    def nothing_is_left(self) -> None:
        """After a drain."""
        scheduler = self.scheduler
        assert not self.lives and not self.running and not scheduler.requests
        assert (len(scheduler.requests), len(scheduler.waiting), len(scheduler.running)) == (0, 0, 0)
        assert not self.kv.owned() and not self.kv.swapped() and self.kv.num_free == self.kv.num_blocks

    def _who_was_sent_back(self, sampled: Mapping[str, SampledTokens]) -> None:
        now = self._running_ids()
        for rid in [rid for rid in self.running if rid not in now]:
            life = self.running.pop(rid)
            assert not sampled or not life.said, f"{rid} was sent back after a step that went well"
            life.is_known = False
        assert list(self.running) == now

    def _queues_are_right(self) -> None:
        scheduler = self.scheduler
        assert list(scheduler.requests) == list(self.lives)
        assert [request.request_id for request in scheduler.waiting] == self._queue()
        assert scheduler.finished_req_ids == self.unannounced

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
        assert self.owned.keys() == set(running), "whoever runs owns memory, and nobody else"
        assert not self.swapped.keys() & set(running)
        holders: dict[int, set[Any]] = {}
        for rid, block_ids in self.owned.items():
            assert len(set(block_ids)) == len(block_ids) and 0 not in block_ids
            family = self.lives[rid].request.parent_id or (rid,)
            for block_id in block_ids:
                holders.setdefault(block_id, set()).add(family)
        assert all(len(families) == 1 for families in holders.values()), "only siblings share blocks"
        assert self.num_free + len(holders) == self.kv.num_blocks, "free and owned blocks together are all"
