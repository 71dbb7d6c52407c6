"""Who fits into a prefill: against a budget that counts pages one by one, and in cases with numbers."""

import random
from collections.abc import Callable, Sequence
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
    adder_class: Callable[..., Any] = PrefillAdder,
    **own: Any,
) -> Any:
    return adder_class(
        tree_cache=cache,
        token_to_kv_pool_allocator=allocator_of(cache),
        running=running,
        new_token_ratio=ratio,
        max_prefill_tokens=max_prefill_tokens,
        max_new_reqs=max_new_reqs,
        num_waiting=num_waiting,
        tracer=tracer or Tracer(),
        **own,
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
    cache = make_cache(rng.choice(["radix", "block_hash", "chunk"]), page_size=page_size, num_pages=rng.randint(10, 60))
    room, cached = cache.page_size * 5, set()

    def text() -> list[int]:
        kinds = rng.choices([1, 2], k=rng.randint(0, 3))
        return [kind for kind in kinds for _ in range(page_size)] + [3] * rng.randint(1, 9)

    while not cache.disable and allocator_of(cache).available_size() > 2 * room and rng.random() < 0.8:
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


def test_a_budget_counted_page_by_page_agrees_on_many_random_queues() -> None:
    rng = random.Random(1)
    seen: dict[AddReqResult, int] = dict.fromkeys(AddReqResult, 0)
    num_admitted, num_locked = 0, 0
    for _ in range(400):
        page_size = rng.choice([1, 4, 16])
        cache, cached, running, waiting = random_queue(rng, page_size)
        free = allocator_of(cache).available_size()
        ratio = rng.randint(0, 64) / 64
        max_prefill, max_new = rng.choice([16, 40, PLENTY]), rng.choice([0, 2, 5, PLENTY])
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
    if not reqs:
        return 0
    prefix_lens = np.array([len(req.prefix_indices) for req in reqs], dtype=np.int64)
    seq_lens = prefix_lens + np.array([req.extend_input_len for req in reqs])
    needed = allocator.num_pages_for_extend(prefix_lens, seq_lens) * allocator.page_size
    if needed > allocator.available_size():
        cache.evict(needed - allocator.available_size())
    last_locs = np.array([req.prefix_indices[-1] if len(req.prefix_indices) else -1 for req in reqs])
    assert allocator.alloc_extend(prefix_lens, seq_lens, last_locs) is not None, "admitted, and there is no room"
    return needed


@pytest.mark.parametrize(("length", "is_admitted"), [(15, True), (16, True), (17, False)])
def test_a_request_alone_at_its_end_may_fill_the_memory(length: int, is_admitted: bool) -> None:
    """It filled the memory before; to wait for more would be to wait for ever."""
    cache = make_cache(page_size=4, num_pages=4)
    adder = make_adder(cache)
    req = make_req(1, [7] * (length - 5), outputs=[1] * 5, max_tokens=5, is_retracted=True)
    assert add(adder, req) is NO_TOKEN
    assert adder.can_run_list == [req] * is_admitted
    assert allocate(cache, adder.can_run_list) == 16 * is_admitted


# --- memory -----------------------------------------------------------------------------------------------------------


def test_nobody_is_charged_for_more_than_4096_future_tokens() -> None:
    assert CLIP_MAX_NEW_TOKENS == 4096
    cache = make_cache(num_pages=3 * 4096)
    running = running_reqs(cache, (1, 10**6))
    adder = make_adder(cache, running)
    assert adder.rem_total_tokens == 2 * 4096 - 1
    assert add(adder, make_req(1, [7], max_tokens=10**6)) is CONTINUE
    assert adder.rem_total_tokens == 4096 - 2
    assert add(adder, make_req(2, [7] * 2, max_tokens=10**6)) is NO_TOKEN


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
    first, *_ = recorder.events("admit")
    assert (first.cur_rem, first.rem_total, first.rem_input, first.need, first.num_waiting) == (80, 80, 16, 15, 4)
    refused = [(event.rid, event.limit, event.needed, event.available) for event in recorder.events("not_admitted")]
    assert refused == [
        ("r2", "memory", 70, 62), ("r3", "max_num_batched_tokens", 9, 8), ("r5", "max_num_seqs", 3, 2),
    ]  # fmt: skip


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
