"""What the scheduler's messages must say, judged by a record of one's own.

`Checks` is the record: it receives every arrival, abort and error, computes from the rule of the fake model what each
request will say and when it must end, and compares every update with that. `MessageChecks` adds m2's messages. The
scheduler's own state is read only where the promise is about that state: who runs, who owns memory, what is still to
be announced.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m1_single_request.request import FinishError, Request
from m1_single_request.sampler import SampledTokens
from m3_paged_attention.errors import KVCapacityError
from tests.testbed.fakes import answer


@dataclass
class Life:
    """The record of a request that has not ended."""

    request: Any
    number: int
    """Its place in the order of arrival."""
    expected: tuple[int, ...]
    """All that it will say if nothing comes between."""
    said: list[int] = field(default_factory=list)
    is_known: bool = False
    """Whether the runner has its tokens and blocks, so that differences may be sent."""
    ran: bool = False
    """Whether it is or was among the running ones: if it waits, it was preempted."""
    marked: bool = False
    """Aborted, failed or given up: it ends at the next update."""
    blocks: list[int] = field(default_factory=list)
    """Its block table, according to the messages."""

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids  # type: ignore[no-any-return]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.said)

    @property
    def num_kv(self) -> int:
        """Tokens that certainly have KV between two steps, if it runs."""
        return self.num_tokens - 1 if self.said else 0


class Checks:
    """The record of all requests that have not ended."""

    def __init__(self, scheduler: Any, *, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.lives: dict[str, Life] = {}  # in order of arrival
        self._num_arrivals = 0

    def added(self, request: Any) -> None:
        """A request arrived."""
        most = min(request.sampling_params.max_tokens, self.max_model_len - len(request.prompt_token_ids))
        self._num_arrivals += 1
        self.lives[request.request_id] = Life(request, self._num_arrivals, self.answer_of(request, most))

    def answer_of(self, request: Any, num_tokens: int) -> tuple[int, ...]:
        """The fake model's answer to a request, of so many tokens at most."""
        stop_token_ids = request.sampling_params.stop_token_ids
        return answer(request.prompt_token_ids, num_tokens, stop_token_ids, seed=request.seed)

    def marked(self, request_ids: Collection[str], marked: Collection[str]) -> None:
        """Requests were aborted or failed, and `marked` was the scheduler's answer."""
        new = {rid: self.lives[rid] for rid in request_ids if rid in self.lives and not self.lives[rid].marked}
        assert list(marked) == list(new)
        for life in new.values():
            life.marked = True

    def fits_alone(self, num_tokens: int) -> bool:
        """Return whether all memory has room for a request of so many tokens."""
        raise NotImplementedError

    def note_failures_for_memory(self) -> None:
        """Mark the requests that a decision failed: they have outgrown all memory."""
        for rid, life in self.lives.items():
            reason = life.request.to_finish
            if reason is not None and not life.marked:
                assert isinstance(reason, FinishError) and isinstance(reason.error, KVCapacityError), (rid, reason)
                assert not self.fits_alone(life.num_tokens), f"{rid} could have run alone"
                life.marked = True

    def ends_of(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Request]) -> dict[str, str]:
        """Compare an update with the record. Returns why requests ended in it, by request id."""
        ends = {rid for rid, life in self.lives.items() if life.marked}
        assert len(changed) == len({request.request_id for request in changed})
        assert {request.request_id for request in changed} == ends | sampled.keys()
        for rid in sampled.keys() - ends:
            life = self.lives[rid]
            life.said += sampled[rid].token_ids[: len(life.expected) - len(life.said)]  # nothing behind its end
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
        return {rid: reason.reason for rid, reason in reasons.items() if reason is not None}


class MessageChecks(Checks):
    """Raises AssertionError at the first message of m2's scheduler that does not say what it must.

    `PagedChecks` has its own view of a decision and of the memory; the queues and the ends are judged alike.
    """

    def __init__(self, scheduler: Any, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        super().__init__(scheduler, max_model_len=max_model_len)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: dict[str, Life] = {}  # in order of admission
        self.unannounced: set[str] = set()
        self._look()

    def scheduled(self, output: Any) -> None:
        """A decision was made; None: there is nothing to compute."""
        self._look()
        if output is not None:
            self._decided(output)
        self._memory_is_sound()

    def _decided(self, output: Any) -> None:
        new, cached, counts = output.scheduled_new_reqs, output.scheduled_cached_reqs, output.num_scheduled_tokens
        ids = [data.req_id for data in new] + cached.req_ids
        assert len(set(ids)) == len(ids) <= self.max_num_seqs
        assert sorted(ids) == sorted(counts)
        assert sum(counts.values()) == output.total_num_scheduled_tokens <= self.max_num_batched_tokens
        assert ids, "a decision without a token is None"
        assert output.finished_req_ids == self.unannounced, "each end is announced once, in the next decision"
        self.unannounced = set()
        for data in new:
            self._new_request(data, counts[data.req_id])
        self._cached_requests(cached, counts)

    def _new_request(self, data: Any, num_scheduled: int) -> None:
        """The full data of a request, which must be the oldest that waits."""
        rid = data.req_id
        if rid not in self.running:
            oldest = next((rid for rid in self._queue() if not self.lives[rid].marked), None)
            assert rid == oldest, f"{rid} overtakes {oldest}"
            self.running[rid] = self.lives[rid]
        life = self.running[rid]
        assert not life.is_known, f"{rid} was sent as new before"
        assert not life.marked, f"{rid} runs although it is to end"
        life.is_known = True
        assert data.prompt_token_ids == life.prompt and num_scheduled == len(life.prompt)
        assert data.sampling_params is life.request.sampling_params
        assert data.num_computed_tokens == 0 and not life.said
        assert data.block_ids == self.owned[rid]
        life.blocks = list(data.block_ids)

    def _cached_requests(self, cached: Any, counts: Mapping[str, int]) -> None:
        """The differences of the requests that were sent before."""
        columns = (cached.new_token_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids)
        for rid, tokens, start, num_output, blocks in zip(cached.req_ids, *columns, strict=True):
            life = self.running[rid]
            assert life.is_known, f"{rid} must be sent in full"
            assert not life.marked, f"{rid} runs although it is to end"
            assert (tokens, start, num_output) == (life.said[-1:], life.num_kv, len(life.said))
            assert counts[rid] == 1
            self._got_blocks(life, start, blocks)
            assert life.blocks == self.owned[rid]

    def _got_blocks(self, life: Life, start: int, blocks: list[int]) -> None:
        """A request that goes on at `start` has more memory."""
        life.blocks += blocks

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Request]) -> dict[str, str]:
        """A step was committed. Returns why requests ended in it, by request id."""
        assert sampled.keys() <= self.running.keys()
        reasons = self.ends_of(sampled, changed)
        self.running = {rid: life for rid, life in self.running.items() if rid in self.lives}
        self.unannounced |= reasons.keys()
        self._who_was_sent_back(sampled)
        scheduler = self.scheduler
        assert list(scheduler.requests) == list(self.lives), "nothing is lost or kept"
        assert [request.request_id for request in scheduler.waiting] == self._queue()
        assert scheduler.finished_req_ids == self.unannounced
        self._look()
        self._memory_is_sound()
        return reasons

    def _who_was_sent_back(self, sampled: Mapping[str, SampledTokens]) -> None:
        """No request is, in m2."""

    def nothing_is_freed(self) -> None:
        """Between a decision and its update the memory stays as it is, whatever happens."""
        assert self._owned() == self.owned

    def nothing_is_left(self) -> None:
        """After a drain."""
        scheduler = self.scheduler
        assert not self.lives and not self.running
        assert (len(scheduler.requests), len(scheduler.waiting), len(scheduler.running)) == (0, 0, 0)
        assert not self._owned()

    def _look(self) -> None:
        """Note the memory, to see whether it stays as it is."""
        self.owned = self._owned()

    def _queue(self) -> list[str]:
        """Who waits, in the order in which they must be let in."""
        return [rid for rid in self.lives if rid not in self.running]

    def _memory_is_sound(self) -> None:
        running = [request.request_id for request in self.scheduler.running]
        assert len(running) <= self.max_num_seqs
        assert running == list(self.running), "in order of admission"
        owned = self._owned()
        assert owned.keys() == set(running), "each running request owns memory, and no other"
        blocks = [block for ids in owned.values() for block in ids]
        assert len(set(blocks)) == len(blocks)

    def _owned(self) -> dict[str, list[int]]:
        return {rid: list(ids) for rid, ids in self.scheduler.kv_manager.owned().items()}
