"""What the scheduler's messages must say, judged by a record of one's own.

`MessageChecks` hears of everything that comes in (arrivals, aborts, errors) and reads everything that goes out. It
knows from the rule of the fake model what each request will say and when it must end, and asks the scheduler's own
state only where the promise is about that state: who runs, who owns memory, what is still to be announced.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m1_single_request.request import Request
from m1_single_request.sampler import SampledTokens
from tests.testbed.fakes import answer


@dataclass
class Life:
    """What is known of a request that has not ended."""

    request: Request
    expected: tuple[int, ...]
    """All that it will say if nothing comes between."""
    said: list[int] = field(default_factory=list)
    sent: bool = False
    """Whether it was sent as new, in an output that was not lost."""
    marked: bool = False
    """Aborted or failed: it ends at the next update."""
    blocks: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def num_kv(self) -> int:
        """Tokens that have KV between two steps."""
        return len(self.prompt) + len(self.said) - 1 if self.said else 0


class MessageChecks:
    """Raises AssertionError at the first message that does not say what it must.

    For a milestone whose messages differ: `new_request` and `cached_requests` judge the two kinds of data in an output.
    """

    def __init__(self, scheduler: Any, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: dict[str, Life] = {}  # in order of arrival
        self.running: dict[str, Life] = {}  # in order of admission
        self.unannounced: set[str] = set()
        self.owned: dict[str, list[int]] = {}  # as of the last decision

    # --- what comes in ------------------------------------------------------------------------------------------------

    def added(self, request: Request) -> None:
        """A request arrived."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        most = min(params.max_tokens, self.max_model_len - len(prompt))
        self.waiting[request.request_id] = Life(request, answer(prompt, most, params.stop_token_ids))

    def marked(self, request_ids: Collection[str], marked: Collection[str]) -> None:
        """Requests were aborted or failed, and `marked` was the scheduler's answer."""
        lives = {rid: self.waiting.get(rid) or self.running.get(rid) for rid in request_ids}
        new = {rid: life for rid, life in lives.items() if life is not None and not life.marked}
        assert list(marked) == list(new)
        for life in new.values():
            life.marked = True

    # --- what goes out ------------------------------------------------------------------------------------------------

    def scheduled(self, output: Any) -> None:
        """A decision was made; None: there is nothing to compute."""
        self.owned = self._owned()
        if output is not None:
            self._decided(output)
        self._memory_belongs_to_the_running()

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
            self.new_request(data, counts[data.req_id])
        self.cached_requests(cached, counts)

    def new_request(self, data: Any, num_scheduled: int) -> None:
        """The full data of a request, which must be the oldest that waits."""
        rid = data.req_id
        if rid in self.waiting:
            oldest = next((rid for rid, life in self.waiting.items() if not life.marked), None)
            assert rid == oldest, f"{rid} overtakes {oldest}"
            self.running[rid] = self.waiting.pop(rid)
        life = self.running[rid]
        assert not life.sent, f"{rid} was sent as new before"
        assert not life.marked, f"{rid} runs although it is to end"
        life.sent = True
        assert data.prompt_token_ids == life.prompt and num_scheduled == len(life.prompt)
        assert data.sampling_params is life.request.sampling_params
        assert data.num_computed_tokens == 0 and not life.said
        assert data.block_ids == self.owned[rid]
        life.blocks = list(data.block_ids)

    def cached_requests(self, cached: Any, counts: Mapping[str, int]) -> None:
        """The differences of the requests that were sent before."""
        columns = (cached.new_token_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids)
        for rid, tokens, start, num_output, blocks in zip(cached.req_ids, *columns, strict=True):
            life = self.running[rid]
            assert life.sent, f"{rid} was never sent as new"
            assert not life.marked, f"{rid} runs although it is to end"
            assert (tokens, start, num_output) == (life.said[-1:], life.num_kv, len(life.said))
            assert counts[rid] == 1
            life.blocks += blocks
            assert life.blocks == self.owned[rid]

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Request]) -> dict[str, str]:
        """A step was committed. Returns why requests ended in it, by request id."""
        ends = {rid for lives in (self.waiting, self.running) for rid, life in lives.items() if life.marked}
        assert len(changed) == len({request.request_id for request in changed})
        assert {request.request_id for request in changed} == ends | sampled.keys()
        for rid in sampled.keys() - ends:
            life = self.running[rid]
            life.said += sampled[rid].token_ids
            assert tuple(life.said) == life.expected[: len(life.said)]
            if len(life.said) == len(life.expected):
                ends.add(rid)
        for rid, life in self.running.items():
            assert life.request.sequence.output_token_ids == life.said
            assert life.request.is_finished == (rid in ends)
        for rid in ends:
            (self.waiting if rid in self.waiting else self.running).pop(rid)
        self.unannounced |= ends
        self._nothing_is_lost_or_kept()
        reasons = {request.request_id: request.finish_reason for request in changed if request.is_finished}
        assert reasons.keys() == ends
        return {rid: reason.reason for rid, reason in reasons.items() if reason is not None}

    def nothing_is_freed(self) -> None:
        """Between a decision and its update the memory stays as it is, whatever happens."""
        assert self._owned() == self.owned

    def nothing_is_left(self) -> None:
        """After a drain."""
        scheduler = self.scheduler
        assert not self.waiting and not self.running and not scheduler.requests
        assert (len(scheduler.requests), len(scheduler.waiting), len(scheduler.running)) == (0, 0, 0)
        assert not self._owned()

    def _nothing_is_lost_or_kept(self) -> None:
        scheduler = self.scheduler
        assert scheduler.requests.keys() == self.waiting.keys() | self.running.keys()
        assert [request.request_id for request in scheduler.waiting] == list(self.waiting)
        assert scheduler.finished_req_ids == self.unannounced
        self._memory_belongs_to_the_running()

    def _memory_belongs_to_the_running(self) -> None:
        running = [request.request_id for request in self.scheduler.running]
        assert len(running) <= self.max_num_seqs
        assert running == list(self.running), "in order of admission"
        owned = self._owned()
        assert owned.keys() == set(running), "whoever runs owns memory, and nobody else"
        blocks = [block for ids in owned.values() for block in ids]
        assert len(set(blocks)) == len(blocks)

    def _owned(self) -> dict[str, list[int]]:
        return {rid: list(ids) for rid, ids in self.scheduler.kv_manager.owned().items()}
