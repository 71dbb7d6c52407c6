"""Who fits into a prefill: against a budget that counts pages one by one, and in cases with numbers."""

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from m4_radix_cache.request import Req
from tests.m4_radix_cache.caches import allocator_of, make_cache
from tests.m4_radix_cache.reqs import fill, make_req
from tests.support.engines import Recorder

CONTINUE, NO_TOKEN, OTHER = AddReqResult.CONTINUE, AddReqResult.NO_TOKEN, AddReqResult.OTHER
PLENTY = 10**6


def make_adder(
    cache: BasePrefixCache,
    running: Sequence[Req] = (),
    *,
    ratio: float = 1.0,
    max_prefill_tokens: int = PLENTY,
    max_new_reqs: int = PLENTY,
    num_waiting: int = PLENTY,
    tracer: Tracer | None = None,
) -> PrefillAdder:
    return PrefillAdder(
        tree_cache=cache,
        token_to_kv_pool_allocator=allocator_of(cache),
        running=running,
        new_token_ratio=ratio,
        max_prefill_tokens=max_prefill_tokens,
        max_new_reqs=max_new_reqs,
        num_waiting=num_waiting,
        tracer=tracer or Tracer(),
    )


def add(adder: PrefillAdder, req: Req) -> AddReqResult:
    req.init_next_round_input(adder.tree_cache)
    return adder.add_one_req(req)


def running_reqs(cache: BasePrefixCache, *lengths: tuple[int, int]) -> list[Req]:
    """Requests that hold the pages of their KV, each with so many prompt tokens and `max_tokens`, after one output."""
    reqs = []
    for number, (length, max_tokens) in enumerate(lengths):
        reqs.append(make_req(-1 - number, [1] * length, max_tokens=max_tokens, outputs=[1]))
        assert allocator_of(cache).alloc(-(-length // cache.page_size) * cache.page_size) is not None
    return reqs


# --- the budget, counted page by page ---------------------------------------------------------------------------------


class Page(NamedTuple):
    """A cached page: the tokens from the beginning to its end."""

    tokens: tuple[int, ...]


class Budget:
    """SEMANTICS S3 in words, except that a request alone at its end may fill the memory.

    Knows which pages are cached and who has locked them; a fraction stays a fraction.
    """

    def __init__(self, adder: PrefillAdder, cached: set[Page], running: Sequence[Req], ratio: float) -> None:
        self.page_size, self.cached = adder.page_size, cached
        self.free = adder.allocator.available_size()
        self.locked: set[Page] = set()
        self.kept = Fraction(ratio) * sum(min(req.max_new_tokens - len(req.output_ids), 4096) for req in running)
        self.num_running, self.taken, self.num_admitted = len(running), 0, 0
        self.rem_input, self.max_new_reqs = adder.rem_input_tokens, adder.max_new_reqs

    def pages(self, req: Req) -> list[Page]:
        """Those that it finds: it needs at least one token to compute."""
        tokens, found = (*req.origin_input_ids, *req.output_ids), []
        for end in range(self.page_size, len(tokens), self.page_size):
            if Page(tokens[:end]) not in self.cached:
                break
            found.append(Page(tokens[:end]))
        return found

    def cur_rem(self, locked: set[Page]) -> int:
        return self.free + len(self.cached - locked) * self.page_size - self.taken

    def rem_total(self, locked: set[Page]) -> Fraction:
        """Ruling 10: a page for each that runs is kept whatever is expected."""
        at_least = self.page_size * (self.num_running + self.num_admitted)
        return self.cur_rem(locked) - max(self.kept, Fraction(at_least))

    def is_short(self, whole: int, need: int, is_at_end: bool, locked: set[Page]) -> bool:
        is_alone = self.num_running + self.num_admitted == 0
        return whole > self.cur_rem(locked) if is_alone and is_at_end else need >= self.rem_total(locked)

    def state(self) -> AddReqResult:
        if self.rem_total(self.locked) <= 0 or self.cur_rem(self.locked) <= 0:
            return NO_TOKEN
        return OTHER if self.rem_input <= 0 else CONTINUE

    def add(self, req: Req) -> AddReqResult:
        found = self.pages(req)
        extend = len(req.origin_input_ids) + len(req.output_ids) - len(found) * self.page_size
        whole = extend if extend % self.page_size == 0 else extend + self.page_size - extend % self.page_size
        need = extend + min(max(req.max_new_tokens - len(req.output_ids), 0), 4096)
        is_at_end = need == extend
        if self.num_admitted >= self.max_new_reqs:
            return OTHER
        if self.is_short(whole, need, is_at_end, self.locked):
            return NO_TOKEN
        if whole >= self.rem_input and self.num_admitted:
            return OTHER
        if self.is_short(whole, need, is_at_end, self.locked | set(found)):
            return NO_TOKEN
        self.locked |= set(found)
        self.num_admitted += 1
        self.taken += whole
        self.kept += min(req.max_new_tokens, 4096)
        self.rem_input -= whole
        return self.state()


def random_queue(rng: random.Random, page_size: int) -> tuple[BasePrefixCache, set[Page], list[Req], list[Req]]:
    """A pool with a cache and running requests in it, and those that wait."""
    cache = make_cache(rng.choice(["radix", "block_hash"]), page_size=page_size, num_pages=rng.randint(10, 60))
    room, cached = cache.page_size * 5, set()

    def text() -> list[int]:
        kinds = rng.choices([1, 2], k=rng.randint(0, 3))
        return [kind for kind in kinds for _ in range(page_size)] + [3] * rng.randint(1, 9)

    while allocator_of(cache).available_size() > 2 * room and rng.random() < 0.8:
        tokens = text()
        if len(tokens) < room:
            fill(cache, tokens)
            ends = range(page_size, len(tokens) + 1, page_size)
            cached |= {Page(tuple(tokens[:end])) for end in ends}
    running = []
    while allocator_of(cache).available_size() > room and rng.random() < 0.5:
        running += running_reqs(cache, (rng.randint(1, room), rng.choice([2, 10, 30, 5000])))
    waiting = []
    for number in range(rng.randint(1, 12)):
        outputs = [4] * rng.choice([0, 0, 0, 3])
        most = rng.choice([3, 5, 12, 40])
        waiting.append(make_req(number, text(), outputs=outputs, max_tokens=most, is_retracted=bool(outputs)))
    return cache, cached, running, waiting


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_budget_counted_page_by_page_agrees_on_a_thousand_random_queues(page_size: int) -> None:
    rng = random.Random(page_size)
    seen: dict[AddReqResult, int] = dict.fromkeys(AddReqResult, 0)
    num_admitted, num_locked = 0, 0
    for _ in range(334):
        cache, cached, running, waiting = random_queue(rng, page_size)
        free = allocator_of(cache).available_size()
        ratio = rng.randint(0, 64) / 64
        max_prefill, max_new = rng.choice([16, 40, PLENTY]), rng.choice([2, 5, PLENTY])
        adder = make_adder(cache, running, ratio=ratio, max_prefill_tokens=max_prefill, max_new_reqs=max_new)
        budget = Budget(adder, cached, running, ratio)
        assert adder.budget_state() is budget.state()
        for req in waiting:  # all of them, even where a scheduler would stop
            result = add(adder, req)
            assert result is budget.add(req)
            assert adder.cur_rem_tokens == budget.cur_rem(budget.locked) >= 0
            assert adder.rem_input_tokens == budget.rem_input
            assert cache.protected_size() == len(budget.locked) * page_size, "a refused request has locked nothing"
            assert allocator_of(cache).available_size() == free, "the pool is not touched"
            seen[result] += 1
        assert len(adder.can_run_list) == budget.num_admitted
        num_admitted += budget.num_admitted
        num_locked += len(budget.locked)
        assert allocate(cache, adder.can_run_list) == budget.taken
        for req in adder.can_run_list:
            cache.dec_lock_ref(req.last_node)
        assert cache.protected_size() == 0
        cache.check_invariants()
    assert min(*seen.values(), num_admitted, num_locked) > 30, "the queues are too tame to say anything"


def allocate(cache: BasePrefixCache, reqs: Sequence[Req]) -> int:
    """What happens to an admitted batch: it gets its slots, evicting as needed. Returns how many, in whole pages."""
    allocator = allocator_of(cache)
    prefix_lens = np.array([len(req.prefix_indices) for req in reqs], dtype=np.int64)
    seq_lens = np.array([len(req.fill_ids) for req in reqs], dtype=np.int64)
    needed = allocator.num_pages_for_extend(prefix_lens, seq_lens) * allocator.page_size
    if not reqs:
        return 0
    if needed > allocator.available_size():
        cache.evict(needed - allocator.available_size())
    last_locs = np.array([req.prefix_indices[-1] if len(req.prefix_indices) else -1 for req in reqs])
    assert allocator.alloc_extend(prefix_lens, seq_lens, last_locs) is not None, "admitted, and there is no room"
    return needed


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "is_admitted"), [(5, False), (4, False), (3, True)])
def test_what_fills_the_memory_exactly_is_refused(max_tokens: int, is_admitted: bool) -> None:
    """A prompt of 12 tokens, 16 slots and a page for the one that runs. Nobody else would fit either way."""
    cache = make_cache(page_size=4, num_pages=6)
    adder = make_adder(cache, running_reqs(cache, (3, 9)), ratio=0.0)
    assert adder.rem_total_tokens == 16
    req = make_req(1, [7] * 12, max_tokens=max_tokens)
    assert add(adder, req) is NO_TOKEN
    assert adder.can_run_list == [req] * is_admitted


@pytest.mark.parametrize(("length", "is_admitted"), [(15, True), (16, True), (17, False)])
def test_whoever_comes_back_at_its_very_end_may_fill_the_memory_if_it_is_alone(length: int, is_admitted: bool) -> None:
    """It filled the memory before; to wait for more would be to wait for ever."""
    cache = make_cache(page_size=4, num_pages=4)
    adder = make_adder(cache)
    req = make_req(1, [7] * (length - 5), outputs=[1] * 5, max_tokens=5, is_retracted=True)
    assert add(adder, req) is NO_TOKEN
    assert adder.can_run_list == [req] * is_admitted
    assert allocate(cache, adder.can_run_list) == 16 * is_admitted


def test_the_last_one_that_fits_ends_the_search() -> None:
    adder = make_adder(make_cache(page_size=4, num_pages=8))
    first, last = make_req(1, [7] * 11, max_tokens=5), make_req(2, [8] * 11, max_tokens=3)
    assert add(adder, first) is CONTINUE
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (20, 15), "prompts are counted in pages, answers in tokens"
    assert add(adder, last) is NO_TOKEN and adder.budget_state() is NO_TOKEN
    assert adder.can_run_list == [first, last]
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (8, 0)


def test_running_requests_keep_the_expected_share_of_what_they_may_still_say() -> None:
    cache = make_cache(num_pages=100)
    running = running_reqs(cache, (10, 21), (10, 41))  # 80 tokens are free, and 20 + 40 may come
    rem_total = [make_adder(cache, running, ratio=ratio).rem_total_tokens for ratio in (0.0, 0.25, 0.5, 1.0)]
    assert rem_total == [78, 65, 50, 20]


@pytest.mark.parametrize(("num_pages", "is_admitted"), [(7, False), (8, True)])
def test_a_page_is_kept_for_each_that_runs_even_if_nothing_is_expected(num_pages: int, is_admitted: bool) -> None:
    """Two requests of two pages each; the third needs one page, with its answer, and two must stay free."""
    cache = make_cache(page_size=4, num_pages=num_pages)
    running = running_reqs(cache, (8, 100), (8, 100))
    adder = make_adder(cache, running, ratio=0.0)
    assert adder.rem_total_tokens == (num_pages - 6) * 4
    add(adder, make_req(1, [7] * 3, max_tokens=1))
    assert bool(adder.can_run_list) == is_admitted
    assert not is_admitted or adder.cur_rem_tokens >= 4 * 2, "everybody's next token has its page"


def test_a_page_is_kept_for_those_that_join_now_too() -> None:
    """Two prompts of a page each would leave no page for their second tokens, though their answers count 4 only."""
    adder = make_adder(make_cache(page_size=16, num_pages=3))
    assert add(adder, make_req(1, [7] * 16, max_tokens=2)) is CONTINUE
    assert add(adder, make_req(2, [8] * 15, max_tokens=2)) is NO_TOKEN
    assert [req.number for req in adder.can_run_list] == [1]
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (32, 16)


def test_what_only_the_cache_holds_counts_as_free() -> None:
    cache = make_cache(num_pages=40)
    fill(cache, [9] * 40)
    adder = make_adder(cache)
    assert allocator_of(cache).available_size() == 0
    assert add(adder, make_req(1, [7] * 30, max_tokens=2)) is CONTINUE
    assert allocate(cache, adder.can_run_list) == 30


def test_what_a_request_has_found_cannot_be_evicted_for_it() -> None:
    """39 tokens are cached and one is free; it needs 10 behind 30 of them, and only the other 9 can be evicted."""
    cache, tracer = make_cache(num_pages=42), Tracer()
    recorder = Recorder(tracer)
    fill(cache, [7] * 30 + [8] * 9)
    adder = make_adder(cache, running_reqs(cache, (1, 9)), ratio=0.0, tracer=tracer)  # holds one, and one is kept
    req = make_req(1, [7] * 30 + [9] * 9, max_tokens=1)
    assert add(adder, req) is NO_TOKEN
    assert (cache.protected_size(), cache.evictable_size()) == (0, 39), "and is not locked"
    (event,) = recorder.events("not_admitted")
    assert (event.limit, event.is_locked, event.needed, event.available, event.evictable) == ("memory", True, 10, 10, 9)
    assert add(adder, make_req(2, [7] * 30 + [9] * 8, max_tokens=1)) is CONTINUE
    assert (cache.protected_size(), adder.cur_rem_tokens, adder.rem_total_tokens) == (30, 3, 1)


def test_a_prefix_that_somebody_has_locked_already_costs_nothing_more() -> None:
    cache = make_cache(num_pages=40)
    fill(cache, [7] * 30)
    adder = make_adder(cache)
    assert add(adder, make_req(1, [7] * 30 + [1], max_tokens=1)) is CONTINUE
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (9, 8)
    assert add(adder, make_req(2, [7] * 30 + [2], max_tokens=1)) is CONTINUE
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (8, 6)


def test_nobody_is_charged_for_more_than_4096_future_tokens() -> None:
    assert CLIP_MAX_NEW_TOKENS == 4096
    cache = make_cache(num_pages=3 * 4096)
    running = running_reqs(cache, (1, 10**6))
    adder = make_adder(cache, running)
    assert adder.rem_total_tokens == 2 * 4096 - 1
    assert add(adder, make_req(1, [7], max_tokens=10**6)) is CONTINUE
    assert adder.rem_total_tokens == 4096 - 2
    assert add(adder, make_req(2, [7] * 2, max_tokens=10**6)) is NO_TOKEN


def test_what_a_retracted_request_has_said_is_computed_and_not_expected_again() -> None:
    """16 slots beside the one that runs: 10 tokens of prompt and answer, 5 may come."""
    for max_tokens, is_admitted in ((9, True), (10, False)):
        cache = make_cache(num_pages=18)
        adder = make_adder(cache, running_reqs(cache, (1, 9)), ratio=0.0)
        req = make_req(1, [7] * 6, outputs=[1] * 4, max_tokens=max_tokens, is_retracted=True)
        add(adder, req)
        assert adder.can_run_list == [req] * is_admitted and req.extend_input_len == 10


def test_more_may_be_expected_than_there_is() -> None:
    cache = make_cache(num_pages=20)
    adder = make_adder(cache, running_reqs(cache, (10, 100)))
    assert (adder.cur_rem_tokens, adder.rem_total_tokens, adder.budget_state()) == (10, -89, NO_TOKEN)
    assert add(adder, make_req(1, [7], max_tokens=1)) is NO_TOKEN


def test_without_a_cache_that_shares_the_free_slots_are_all_there_is() -> None:
    adder = make_adder(make_cache("chunk", page_size=4, num_pages=5))
    assert add(adder, make_req(1, [7] * 5, max_tokens=2)) is CONTINUE
    assert (adder.cur_rem_tokens, adder.rem_total_tokens) == (12, 8)


# --- places and tokens ------------------------------------------------------------------------------------------------


def test_as_many_join_as_may_run() -> None:
    adder = make_adder(make_cache(), max_new_reqs=2)
    reqs = [make_req(number, [number], max_tokens=1) for number in range(3)]
    assert [add(adder, req) for req in reqs] == [CONTINUE, CONTINUE, OTHER]
    assert adder.can_run_list == reqs[:2]
    assert add(make_adder(make_cache(), max_new_reqs=0), reqs[0]) is OTHER


def test_prompts_join_as_far_as_the_budget_reaches_in_whole_pages() -> None:
    cache = make_cache(page_size=4, num_pages=60)
    adder = make_adder(cache, max_prefill_tokens=16)
    assert add(adder, make_req(1, [7] * 5, max_tokens=1)) is CONTINUE
    assert adder.rem_input_tokens == 8
    assert add(adder, make_req(2, [8] * 5, max_tokens=1)) is OTHER, "two pages are not less than the two that are left"
    assert add(adder, make_req(3, [8] * 4, max_tokens=1)) is CONTINUE
    assert adder.rem_input_tokens == 4 and [req.number for req in adder.can_run_list] == [1, 3]


def test_what_is_cached_takes_nothing_of_the_token_budget() -> None:
    cache = make_cache(page_size=4, num_pages=60)
    fill(cache, [7] * 40)
    adder = make_adder(cache, max_prefill_tokens=8)
    assert add(adder, make_req(1, [7] * 40 + [1], max_tokens=1)) is CONTINUE
    assert adder.rem_input_tokens == 4


def test_a_retracted_request_that_outgrew_the_token_budget_runs_alone() -> None:
    adder = make_adder(make_cache(num_pages=60), max_prefill_tokens=16)
    grown = make_req(1, [7] * 10, outputs=[1] * 10, max_tokens=12, is_retracted=True)
    assert add(adder, grown) is OTHER and adder.can_run_list == [grown]
    assert add(adder, make_req(2, [8], max_tokens=1)) is OTHER and adder.can_run_list == [grown]
    adder = make_adder(make_cache(num_pages=60), max_prefill_tokens=16)
    assert add(adder, make_req(2, [8], max_tokens=1)) is CONTINUE
    assert add(adder, grown) is OTHER and grown not in adder.can_run_list, "only the first may"


# --- the trace --------------------------------------------------------------------------------------------------------


def test_the_trace_has_the_budget_that_a_request_was_judged_by() -> None:
    cache, tracer = make_cache(page_size=4, num_pages=25), Tracer()
    recorder = Recorder(tracer)
    fill(cache, [7] * 40)
    adder = make_adder(cache, max_prefill_tokens=16, max_new_reqs=2, num_waiting=5, tracer=tracer)
    add(adder, make_req(1, [7] * 20 + [1] * 5, outputs=[2], max_tokens=10, is_retracted=True))
    add(adder, make_req(2, [8] * 60, max_tokens=10))
    add(adder, make_req(3, [8] * 9, max_tokens=1))
    add(adder, make_req(4, [8], max_tokens=1))
    add(adder, make_req(5, [8], max_tokens=1))
    assert recorder.kinds() == ["admit", "not_admitted", "not_admitted", "admit", "not_admitted"]
    events: list[Any] = [record.event for record in recorder.records]
    budget = {"cur_rem": 80, "rem_total": 80, "rem_input": 16, "evictable": 20}
    assert events[0].data() == budget | {
        "rid": "r1",
        "node": 2,
        "prefix": 20,
        "extend": 6,
        "num_waiting": 4,
        "num_output_tokens": 1,
        "need": 15,
        "result": "continue",
    }
    budget = {"cur_rem": 72, "evictable": 20, "is_locked": False, "prefix": 0, "num_waiting": 4}
    assert events[1].data() == budget | {"rid": "r2", "limit": "memory", "needed": 70, "available": 62}
    assert events[2].data() == budget | {"rid": "r3", "limit": "max_num_batched_tokens", "needed": 9, "available": 8}
    assert (events[3].result, events[3].num_waiting) == ("continue", 3)
    assert (events[4].limit, events[4].needed, events[4].available) == ("max_num_seqs", 3, 2)
    assert events[0].explain() == (
        "r1 joins: 6 tokens to compute, 20 more are in the cache; 1 of all are its own output from before it was "
        "retracted. It may need 15 slots of 80 (80 not taken yet, 20 of them only by eviction, less 0 kept for those "
        "that run). This step could compute 16."
    )
    assert events[2].explain() == (
        "r3 must wait: its 9 tokens, in whole pages, are not less than the 8 that are left of this step's budget."
    )


# --- how much is expected ---------------------------------------------------------------------------------------------


def test_the_expected_share_falls_to_its_least_within_600_decodes() -> None:
    ratio = NewTokenRatio()
    assert (ratio.value, ratio.min) == (0.7, pytest.approx(0.098))
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(301):
        ratio.decay()
    assert ratio.value == ratio.min
    ratio.reset()
    assert ratio.value == 0.7


@pytest.mark.parametrize(("conservativeness", "first"), [(0.0, 0.0), (0.5, 0.35), (1.4, 0.98), (9.0, 1.0)])
def test_conservativeness_scales_the_expected_share_up_to_all(conservativeness: float, first: float) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert (ratio.value, ratio.min) == (pytest.approx(first), pytest.approx(first * 0.14))


def test_after_a_retraction_the_share_is_what_was_said_and_20_more_each() -> None:
    ratio = NewTokenRatio()
    reqs = [make_req(number, [7], outputs=[1] * number, max_tokens=100) for number in (10, 30)]
    ratio.after_retraction(reqs)
    assert ratio.value == pytest.approx((10 + 30 + 2 * 20) / (200 + 1))
    ratio.after_retraction([make_req(1, [7], outputs=[1] * 10, max_tokens=10)])
    assert ratio.value == 1.0
