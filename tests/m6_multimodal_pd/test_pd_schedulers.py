"""The queues of a decode scheduler: room is taken for requests and given back, on real pools.

Those of both sides between engines: `test_pd_failures.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from m1_single_request.request import FinishAbort, FinishError, RequestStatus
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import NO_SLOTS, Req
from m4_radix_cache.schedule_batch import Pools
from m5_chunked_prefill_spec.batch_composer import DecodeFirst
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m6_multimodal_pd.disaggregation.decode_scheduler import NUM_RESERVED_TOKENS, DecodeScheduler
from tests.m4_radix_cache.caches import find, hit, make_cache
from tests.m4_radix_cache.reqs import fill, make_req
from tests.support.engines import Recorder

PAGE_SIZE = 4


def made(scheduler_class: Any, cache: BasePrefixCache, tracer: Tracer) -> Any:
    """A scheduler over the pools of a cache."""
    rows = cache.req_to_token_pool
    return scheduler_class(
        scheduler_config=SchedulerConfig(max_num_seqs=rows.size).resolved(10_000),
        pools=Pools(rows, cache.token_to_kv_pool_allocator, cache),
        policy=SchedulePolicy("fcfs", tree_cache=cache, seed=0, tracer=tracer),
        prefill_adder=PrefillAdder,
        composer=DecodeFirst(),
        speculation=None,
        chunk_alignment=1,
        preemption=FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids=set(), max_model_len=10_000),
        vocab_size=20_000,
        device=torch.device("cpu"),
        tracer=tracer,
    )


class Bed:
    """The scheduler of a decode engine over small pools."""

    def __init__(
        self, num_pages: int = 16, *, page_size: int = PAGE_SIZE, num_rows: int = 4, kind: str = "radix"
    ) -> None:
        self.cache = make_cache(kind, page_size=page_size, num_pages=num_pages, num_rows=num_rows)
        self.rows, self.allocator = self.cache.req_to_token_pool, self.cache.token_to_kv_pool_allocator
        tracer = Tracer()
        self.recorder = Recorder(tracer)
        self.scheduler: DecodeScheduler = made(DecodeScheduler, self.cache, tracer)
        self._number = 0

    def expect(self, tokens: int | Sequence[int], **settings: Any) -> Req:
        """A request whose KV is to come."""
        self._number += 1
        first = self._number * 1000
        prompt = list(range(first, first + tokens)) if isinstance(tokens, int) else tokens
        req = make_req(self._number, prompt, **settings)
        self.scheduler.add_request(req)
        return req

    def runs(self, **settings: Any) -> Req:
        """Another request, which has a row and no KV."""
        req = self.expect([1], **settings)
        (req.req_pool_idx,) = self.rows.alloc(1) or ()
        req.status = RequestStatus.RUNNING
        del self.scheduler.prealloc_queue[req.rid]
        return req

    def preallocate(self) -> list[str]:
        return [req.rid for req in self.scheduler.preallocate()]

    def end(self, req: Req) -> None:
        """End a request with an error: its KV is not shared."""
        self.scheduler.finish_requests([req.rid], FinishError(ValueError()))
        self.scheduler.update_from_output(None, None)

    def state(self, *reqs: Req) -> Any:
        """All that may change when room is taken."""
        memory = (
            self.allocator.available_size(),
            self.cache.evictable_size(),
            self.cache.protected_size(),
            self.rows.available_size(),
        )
        scheduler = self.scheduler
        queues = [list(own) for own in (scheduler.prealloc_queue, scheduler.transfer_queue, scheduler.arrivals)]
        return memory, queues, [(req.req_pool_idx, req.last_node, req.status, req.kv_committed_len) for req in reqs]

    def row(self, req: Req) -> list[int]:
        assert req.req_pool_idx is not None
        return self.rows.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()  # type: ignore[no-any-return]


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "num_tokens"), [(4, 10), (8, 10), (8, 12), (12, 12), (8, 9)])
def test_what_is_cached_is_locked_and_not_sent(cached: int, num_tokens: int) -> None:
    bed, prompt = Bed(), list(range(num_tokens))
    fill(bed.cache, prompt[:cached])
    known = find(bed.cache, prompt[:cached]).device_indices.tolist()
    available = bed.allocator.available_size()
    req = bed.expect(prompt)
    assert bed.preallocate() == [req.rid]
    missing = -(-num_tokens // PAGE_SIZE) - cached // PAGE_SIZE
    assert available - bed.allocator.available_size() == missing * PAGE_SIZE
    assert bed.row(req)[:cached] == known and len(bed.row(req)) == num_tokens
    assert not set(bed.scheduler.pages(req)[cached // PAGE_SIZE :]) & {slot // PAGE_SIZE for slot in known}
    assert (req.kv_committed_len, req.cache_protected_len, req.cached_tokens) == (cached, cached, cached)
    assert bed.cache.protected_size() == cached and bed.cache.evictable_size() == 0
    bed.cache.evict(1000)
    assert hit(bed.cache, prompt) == cached, "it is still there when the rest comes"
    assert [(told.rid, told.device_hit) for told in bed.recorder.events("matched")] == [(req.rid, cached)]
    bed.end(req)
    assert (bed.cache.protected_size(), bed.cache.evictable_size()) == (0, cached)


def test_nobody_has_its_own_prefix_evicted() -> None:
    """Locked first, and then counted: what it starts from is no room for the rest."""
    bed, prompt = Bed(num_pages=4), list(range(16))
    fill(bed.cache, prompt[:8])
    fill(bed.cache, range(500, 508))
    req = bed.expect(prompt, max_tokens=1)
    assert bed.preallocate() == [req.rid]
    assert req.kv_committed_len == 8 and hit(bed.cache, range(500, 508)) == 0


# --- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "num_rows"), [(0, 4), (8, 4), (0, 1)], ids=["memory", "cached", "rows"])
def test_without_room_nothing_changes(cached: int, num_rows: int) -> None:
    bed, prompt = Bed(num_pages=8 if num_rows > 1 else 99, num_rows=num_rows), list(range(20))
    fill(bed.cache, prompt[:cached])
    other = bed.expect(16, max_tokens=8)
    assert bed.preallocate() == [other.rid]
    req = bed.expect(prompt)
    before = bed.state(req)
    for _ in range(3):
        assert bed.preallocate() == []
    assert bed.state(req) == before and req.prefix_indices is NO_SLOTS
    assert bed.scheduler.prealloc_queue == {req.rid: req} and req.to_finish is None
    bed.end(other)
    assert bed.preallocate() == [req.rid], "when there is room"


def test_the_oldest_goes_first_and_nobody_overtakes_it() -> None:
    bed = Bed(num_pages=16)
    bed.runs(max_tokens=1)
    large, small = bed.expect(64, max_tokens=4), bed.expect(1, max_tokens=1)
    assert bed.preallocate() == []
    assert list(bed.scheduler.prealloc_queue) == [large.rid, small.rid]
    large.to_finish = FinishAbort()
    assert bed.preallocate() == [small.rid], "whoever is to end is passed by"


# --- what is kept for others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_tokens", "others", "mine", "is_taken"),
    [
        (8 + 1 + 1, [1], 1, True),
        (8 + 1 + 0, [1], 1, False),
        (8 + 5 + 7 + 9, [5, 7], 9, True),
        (8 + 5 + 7 + 8, [5, 7], 9, False),
        (8 + NUM_RESERVED_TOKENS + 3, [NUM_RESERVED_TOKENS + 100], 3, True),
        (8 + NUM_RESERVED_TOKENS + 2, [NUM_RESERVED_TOKENS + 100], 3, False),
        (8 + 3 + NUM_RESERVED_TOKENS, [3], 10 * NUM_RESERVED_TOKENS, True),
        (8 + 2 + NUM_RESERVED_TOKENS, [3], 10 * NUM_RESERVED_TOKENS, False),
    ],
)
def test_room_is_kept_for_the_answers_of_all(free_tokens: int, others: list[int], mine: int, is_taken: bool) -> None:
    bed = Bed(num_pages=free_tokens, page_size=1, num_rows=8)
    for left in others:
        bed.runs(max_tokens=left + 3, outputs=(7, 7, 7))
    req = bed.expect(8, max_tokens=mine)
    before = bed.state(req)
    assert bed.preallocate() == [req.rid] * is_taken
    assert is_taken or bed.state(req) == before


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(16, 1), (15, 1), (15, 2), (13, 3), (14, 99), (1, 99)])
def test_alone_a_request_is_let_in_if_its_next_token_has_room(num_tokens: int, max_tokens: int) -> None:
    """Then as in an engine that does all of it: the answer may end in the last page."""
    bed = Bed(num_pages=4)
    req = bed.expect(num_tokens, max_tokens=max_tokens)
    assert bed.preallocate() == [req.rid] and req.to_finish is None


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "outputs"), [(17, 1, ()), (16, 2, ()), (100, 9, ()), (10, 9, (7, 7, 7, 7, 7, 7))]
)
def test_alone_a_request_that_outgrew_memory_ends(num_tokens: int, max_tokens: int, outputs: tuple[int, ...]) -> None:
    bed = Bed(num_pages=4)
    fill(bed.cache, range(500, 508))
    req = bed.expect(num_tokens, max_tokens=max_tokens, outputs=outputs)
    before = bed.state(req)
    assert bed.preallocate() == [] and bed.state(req) == before
    reason = req.to_finish
    assert isinstance(reason, FinishError) and isinstance(reason.error, KVCapacityError)
    assert f"{req.seqlen} tokens" in str(reason.error) and "room for 16" in str(reason.error)
    bed.end(req)
    small = bed.expect(4)
    assert bed.preallocate() == [small.rid], "others are not touched"


@pytest.mark.parametrize("who", ["runs", "waits", "comes"])
def test_a_request_that_is_too_large_beside_others_waits(who: str) -> None:
    bed = Bed(num_pages=4)
    if who == "runs":
        bed.runs(max_tokens=2)
    elif who == "waits":
        bed.scheduler.waiting_queue.append(make_req(50, [1]))
    else:
        bed.expect(1)
        bed.preallocate()
    req = bed.expect(16, max_tokens=9)
    assert bed.preallocate() == [] and req.to_finish is None


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    actions=st.lists(st.tuples(st.sampled_from(["take", "end", "complete"]), st.integers(0, 7)), max_size=20),
    page_size=st.sampled_from([1, 4]),
)
def test_memory_is_held_by_requests_in_queues(
    lengths: list[int], actions: list[tuple[str, int]], page_size: int
) -> None:
    bed = Bed(num_pages=48 // page_size, page_size=page_size)
    whole = bed.state()
    reqs = [bed.expect(length, max_tokens=4) for length in lengths]
    for what, index in actions:
        req = reqs[index % len(reqs)]
        match what:
            case "take":
                bed.preallocate()
            case "end" if req.rid in bed.scheduler.requests:
                bed.end(req)
            case "complete" if req.rid in bed.scheduler.transfer_queue:
                bed.scheduler.complete(req.rid, SampledTokens((1,), (None,)))
        bed.scheduler.check_invariants()
        held = [own for own in bed.scheduler.requests.values() if own.req_pool_idx is not None]
        pages = [page for own in held for page in bed.scheduler.pages(own).tolist()]
        assert len(pages) == len(set(pages)), "no page is of two"
        assert bed.allocator.available_size() == 48 - len(pages) * page_size
        assert set(bed.scheduler.first_tokens) == set(bed.scheduler.arrivals)
    for req in reqs:
        bed.end(req)
    assert bed.state() == whole and not bed.scheduler.elsewhere
