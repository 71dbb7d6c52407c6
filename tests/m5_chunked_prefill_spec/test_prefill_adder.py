"""How much of a prompt fits into a step: against a budget that counts token by token, and in cases with numbers.

What memory an admitted request needs is counted as in m4, and so its model of the budget is used here, too. New are the
tokens of the step: they are counted one by one, and whoever does not fit is cut.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from tests.m4_radix_cache.caches import allocator_of, make_cache
from tests.m4_radix_cache.reqs import make_req
from tests.m4_radix_cache.test_prefill_adder import (
    PLENTY,
    Budget as WholeBudget,
    add,
    allocate,
    make_adder as make_whole_adder,
    random_queue,
    running_reqs,
)
from tests.support.engines import Recorder

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER


def make_adder(
    cache: BasePrefixCache,
    running: Sequence[Req] = (),
    *,
    tokens: int = PLENTY,
    chunk: int | None = None,
    align: int = 1,
    **limits: Any,
) -> PrefillAdder:
    own = {"is_chunked": True, "has_whole_step": True, "bound_by": "max_num_batched_tokens"}
    limits = {"adder_class": PrefillAdder, "rem_chunk_tokens": chunk, "chunk_alignment": align, **own, **limits}
    return make_whole_adder(cache, running, max_prefill_tokens=tokens, **limits)  # type: ignore[no-any-return]


def begun(cache: BasePrefixCache, number: int, length: int, num_computed: int, **settings: Any) -> Req:
    """A request that has computed so many tokens of its prompt, all of them its own."""
    req = make_req(number, [7] * length, **settings)
    slots = allocator_of(cache).alloc(-(-num_computed // cache.page_size) * cache.page_size)
    assert slots is not None
    req.fill_ids = req.origin_input_ids + req.output_ids
    req.prefix_indices = slots[:num_computed]
    req.extend_input_len = len(req.fill_ids) - num_computed
    return req


# --- the budget, counted token by token -------------------------------------------------------------------------------


class Budget(WholeBudget):
    """SEMANTICS S3 with chunks, in words."""

    def __init__(self, adder: PrefillAdder, cached: Any, running: Sequence[Req], ratio: float) -> None:
        super().__init__(adder, cached, running, ratio)
        self.align = adder.chunk_alignment
        self.cut: Req | None = None

    def piece(self, rest: int, most: int) -> int:
        """How many tokens one can count before the step, or `most`, is full."""
        given = 0
        while given < min(rest, most) and given < self.rem_input:
            given += 1
        while given < rest and given % self.align:
            given -= 1
        return given

    def take(self, req: Req, given: int, rest: int, new_pages: int) -> AddReqResult:
        self.num_admitted += 1
        self.taken += new_pages * self.page_size
        self.rem_input -= given
        if given < rest:
            self.cut = req
            return OTHER
        self.kept += min(req.max_new_tokens, 4096)
        return self.state()

    def add(self, req: Req) -> AddReqResult:
        found = self.pages(req)
        extend = len(req.origin_input_ids) + len(req.output_ids) - len(found) * self.page_size
        whole = -(-extend // self.page_size) * self.page_size
        need = extend + min(max(req.max_new_tokens - len(req.output_ids), 0), 4096)
        if self.num_admitted >= self.max_new_reqs:
            return OTHER
        if self.is_short(whole, need, need == extend, self.locked):
            return NO_TOKEN
        given = self.piece(extend, extend)
        if not given:
            return OTHER
        if self.is_short(whole, need, need == extend, self.locked | set(found)):
            return NO_TOKEN
        self.locked |= set(found)
        return self.take(req, given, extend, -(-given // self.page_size))

    def add_chunked(self, req: Req) -> AddReqResult:
        """Page by page: a page stays free for each that runs."""
        start, rest = len(req.prefix_indices), req.extend_input_len
        pages = self.cur_rem(self.locked) // self.page_size - self.num_running
        room = 0
        while room < rest and (pages > 0 or (start + room) % self.page_size):
            pages -= (start + room) % self.page_size == 0
            room += 1
        given = self.piece(rest, room)
        if not given:
            return NO_TOKEN if not room else OTHER
        first, last = -(-start // self.page_size), -(-(start + given) // self.page_size)
        return self.take(req, given, rest, last - first)


def test_a_budget_counted_token_by_token_agrees_on_many_random_queues() -> None:
    rng = random.Random(1)
    seen: dict[Any, int] = dict.fromkeys([*AddReqResult, "cut", "went on", "crowded out"], 0)
    for _ in range(800):
        page_size = rng.choice([1, 4, 16])
        cache, cached, running, waiting = random_queue(rng, page_size)
        align = rng.choice([1, page_size])
        chunked = somebody_in_pieces(rng, cache, align) if rng.random() < 0.6 else None
        if chunked is not None and rng.random() < 0.4:
            use_up(cache, cached, rng.randint(0, len(running) + 2))
        ratio, chunk = rng.randint(0, 64) / 64, rng.choice([None, 16, 20, 33])
        tokens, max_new = rng.choice([16, 17, 40, PLENTY]), rng.choice([2, 5, PLENTY])
        adder = make_adder(cache, running, ratio=ratio, tokens=tokens, chunk=chunk, align=align, max_new_reqs=max_new)
        budget = Budget(adder, cached, running, ratio)
        assert budget.rem_input == min(tokens, chunk or tokens)
        if chunked is not None:
            wanted = budget.add_chunked(chunked)
            result = adder.add_chunked_req(chunked)
            assert result is wanted
            seen["went on"] += chunked in adder.can_run_list
            seen["crowded out"] += result is NO_TOKEN and chunked not in adder.can_run_list
        for req in waiting if budget.cut is None else []:
            result = add(adder, req)
            assert result is budget.add(req)
            assert (adder.cur_rem_tokens, adder.rem_input_tokens) == (budget.cur_rem(budget.locked), budget.rem_input)
            assert adder.cur_rem_tokens >= 0
            assert cache.protected_size() == len(budget.locked) * page_size, "a refused request has locked nothing"
            seen[result] += 1
            if budget.cut is not None:
                break
        assert adder.new_chunked_req is budget.cut and len(adder.can_run_list) == budget.num_admitted
        seen["cut"] += budget.cut is not None
        assert allocate(cache, adder.can_run_list) == budget.taken
    assert min(seen.values()) > 5, "the queues are too tame to say anything"


def somebody_in_pieces(rng: random.Random, cache: BasePrefixCache, align: int) -> Req | None:
    """Whoever has computed a part of its prompt, if there is room for it."""
    available = allocator_of(cache).available_size()
    start = rng.randint(1, max(available // 2, 1)) // align * align
    if not 0 < start <= available - cache.page_size:
        return None
    return begun(cache, 99, start + rng.randint(1, 60), start, max_tokens=5)


def use_up(cache: BasePrefixCache, cached: set[Any], num_pages: int) -> None:
    """Leave so many free pages, and nothing that could be evicted."""
    allocator = allocator_of(cache)
    cache.evict(allocator.size)
    cached.clear()
    allocator.alloc(max(allocator.available_size() - num_pages * cache.page_size, 0))


# --- the trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "bound_by"),
    [
        ({"tokens": 32}, "max_num_batched_tokens"),
        ({"tokens": 64, "chunk": 32}, "chunked_prefill_size"),
        ({"tokens": 32, "chunk": 32}, "max_num_batched_tokens"),
        ({"tokens": 32, "bound_by": "target_gap_ms"}, "target_gap_ms"),
        ({"tokens": 64, "chunk": 32, "bound_by": "target_gap_ms"}, "chunked_prefill_size"),
    ],
)
def test_the_trace_says_which_limit_cut_a_prompt(limits: dict[str, Any], bound_by: str) -> None:
    cache, tracer = make_cache(num_pages=500), Tracer()
    recorder = Recorder(tracer)
    add(make_adder(cache, tracer=tracer, **limits), make_req(1, [7] * 100, max_tokens=5))
    make_adder(cache, tracer=tracer, **limits).add_chunked_req(begun(cache, 2, 90, 40, max_tokens=5))
    events = recorder.events("chunk_cut")
    assert [event.data() for event in events] == [
        {"rid": "r1", "asked": 100, "given": 32, "start": 0, "total": 100, "bound_by": bound_by},
        {"rid": "r2", "asked": 50, "given": 32, "start": 40, "total": 90, "bound_by": bound_by},
    ]


@pytest.mark.parametrize(("page_size", "num_free_pages", "given"), [(1, 3, 1), (4, 4, 8), (4, 2, 0)])
def test_the_trace_says_that_memory_cut_a_prompt(page_size: int, num_free_pages: int, given: int) -> None:
    """A page stays for each of the two that run. Nothing is kept for what the rest will need: it must end."""
    cache, tracer = make_cache(page_size=page_size, num_pages=2 + 8 // page_size + num_free_pages), Tracer()
    recorder = Recorder(tracer)
    running = running_reqs(cache, (1, 100), (1, 100))
    req = begun(cache, 1, 38, 8, max_tokens=5)
    adder = make_adder(cache, running, ratio=1.0, tokens=20, tracer=tracer)
    assert adder.add_chunked_req(req) is (OTHER if given else NO_TOKEN)
    assert [(cut.given, cut.bound_by) for cut in recorder.events("chunk_cut")] == [(given, "memory")] * bool(given)
