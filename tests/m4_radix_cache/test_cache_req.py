"""A request's KV on its way into the cache: what is shared, who owns each page afterwards, and what is free."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from tests.m4_radix_cache.caches import (
    SHARING,
    FakeReq,
    admit,
    audit,
    decode,
    extend,
    hit,
    make_cache,
    owned_by,
    row_of,
)
from tests.support.amounts import examples


@pytest.fixture(params=SHARING)
def cache(request: pytest.FixtureRequest) -> Any:
    return make_cache(request.param, page_size=4)


def sizes(cache: BasePrefixCache, *reqs: FakeReq) -> tuple[int, int, int, int]:
    """Free pages, evictable ones, protected ones, and those of requests."""
    tokens = cache.token_to_kv_pool_allocator.available_size(), cache.evictable_size(), cache.protected_size()
    return (*(count // cache.page_size for count in tokens), owned_by(cache, reqs) // cache.page_size)


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize("ends", [False, True], ids=["unfinished", "finished"])
def test_slots_without_kv_are_never_shared(cache: BasePrefixCache, ends: bool) -> None:
    """The next tokens are in flight: they have slots, no KV, and may fill a page."""
    req = admit(cache, "a", tokens(6))
    req.key.append(tokens(7, 6))
    extend(cache, req, 13)
    req.kv_committed_len = 7
    if ends:
        cache.cache_finished_req(req)
        assert sizes(cache) == (63, 1, 0, 0)
    else:
        cache.cache_unfinished_req(req)
        assert sizes(cache, req) == (60, 0, 1, 3) and req.cache_protected_len == 4
    assert hit(cache, tokens(13)) == 4


def test_a_finished_request_holds_nothing(cache: BasePrefixCache) -> None:
    req = admit(cache, "a", tokens(9))
    cache.cache_finished_req(req)
    assert req.req_pool_idx is None and req.last_node is None and req.prefix_indices.tolist() == []
    assert (req.cache_protected_len, req.kv_committed_len, req.kv_allocated_len) == (0, 0, 0)
    with pytest.raises(AssertionError, match="a has no row"):
        cache.cache_finished_req(req)
    with pytest.raises(AssertionError, match="a has no row"):
        cache.cache_unfinished_req(req)


# --- random requests --------------------------------------------------------------------------------------------------


class World:
    """Requests in a small pool, and for every slot the tokens whose KV was written there."""

    def __init__(self, kind: str, page_size: int, num_pages: int) -> None:
        self.cache = make_cache(kind, page_size=page_size, num_pages=num_pages, num_rows=4, max_context_len=64)
        self.memory: dict[int, tuple[str | None, Sequence[int]]] = {}
        self.reqs: dict[str, FakeReq] = {}

    def admit(self, name: str, prompt: list[int], extra_key: str | None) -> None:
        if name not in self.reqs and self._has_room(len(prompt)):
            self.reqs[name] = admit(self.cache, name, prompt, extra_key=extra_key)
            self._compute(self.reqs[name], self.reqs[name].cache_protected_len)

    def decode(self, name: str, token: int) -> None:
        if name in self.reqs and self._has_room(1):
            decode(self.cache, self.reqs[name], token)
            self._compute(self.reqs[name], len(self.reqs[name].key) - 1)

    def share(self, name: str) -> None:
        if name in self.reqs:
            req = self.reqs[name]
            self.cache.cache_unfinished_req(req)
            self._check_kept(req.key.token_ids(0, req.kv_committed_len), req.key.extra_key)
            assert req.prefix_indices.tolist() == row_of(self.cache, req)[: req.kv_committed_len]

    def end(self, name: str, is_insert: bool) -> None:
        if name in self.reqs:
            req = self.reqs.pop(name)
            computed = req.key.token_ids(0, req.kv_committed_len)
            self.cache.cache_finished_req(req, is_insert=is_insert)
            if is_insert:
                self._check_kept(computed, req.key.extra_key)

    def look(self) -> None:
        """Everybody finds the KV of its own tokens, nobody else writes where it reads; and every slot has an owner."""
        audit(self.cache, list(self.reqs.values()))
        owned = self.cache.token_to_kv_pool_allocator.owned_pages().tolist()
        own_pages: list[int] = []
        for name, req in self.reqs.items():
            row, known = row_of(self.cache, req), req.key.token_ids(0, len(req.key))
            for position, slot in enumerate(row):
                assert self.memory[slot] == (req.key.extra_key, known[: position + 1]), f"{name} reads what is not its"
            assert {slot // self.cache.page_size for slot in row} <= set(owned), f"a page of {name} is free"
            assert row[: len(req.prefix_indices)] == req.prefix_indices.tolist()
            own_pages += sorted({slot // self.cache.page_size for slot in row[req.cache_protected_len :]})
        assert len(own_pages) == len(set(own_pages)), "a page has two owners"

    def drain(self) -> None:
        for name in list(self.reqs):
            self.end(name, True)
        cache, allocator = self.cache, self.cache.token_to_kv_pool_allocator
        assert cache.protected_size() == 0 and allocator.available_size() + cache.evictable_size() == allocator.size
        cache.evict(allocator.size)
        assert allocator.available_size() == allocator.size
        assert cache.req_to_token_pool.available_size() == cache.req_to_token_pool.size

    def _compute(self, req: FakeReq, start: int) -> None:
        row, known = row_of(self.cache, req), req.key.token_ids(0, len(req.key))
        for position in range(start, len(row)):
            self.memory[row[position]] = (req.key.extra_key, known[: position + 1])

    def _check_kept(self, computed: Sequence[int], extra_key: str | None) -> None:
        """A lookup of these tokens finds all their whole pages, unless the cache keeps nothing."""
        whole = len(computed) // self.cache.page_size * self.cache.page_size
        assert hit(self.cache, computed, extra_key=extra_key) == (0 if self.cache.disable else whole)

    def _has_room(self, num_tokens: int) -> bool:
        """Room in the worst case: not a page of it is cached."""
        allocator = self.cache.token_to_kv_pool_allocator
        needed = (-(-num_tokens // self.cache.page_size) + 1) * self.cache.page_size
        self.cache.evict(needed - allocator.available_size())
        return allocator.available_size() >= needed


NAMES = st.sampled_from("abcd")
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=12)
VERBS = st.one_of(
    st.tuples(st.just("admit"), NAMES, PROMPTS, st.sampled_from([None, None, "x"])),
    st.tuples(st.just("admit"), NAMES, PROMPTS, st.none()),
    st.tuples(st.just("decode"), NAMES, st.sampled_from([0, 0, 1])),
    st.tuples(st.just("share"), NAMES),
    st.tuples(st.just("end"), NAMES, st.booleans()),
)


@pytest.mark.parametrize("kind", [*SHARING, "chunk"])
@settings(max_examples=examples(100))
@given(
    page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(4, 20), verbs=st.lists(VERBS, min_size=5, max_size=40)
)
def test_everybody_reads_its_own_tokens_and_every_slot_has_one_owner(
    kind: str, page_size: int, num_pages: int, verbs: list[tuple[Any, ...]]
) -> None:
    world = World(kind, page_size, num_pages)
    for verb, *arguments in verbs:
        getattr(world, verb)(*arguments)
        world.look()
    world.drain()
