"""Chained block hashes: what a digest stands for, and in which order blocks go."""

import itertools

import pytest

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import Events, allocator_of, find, hit, make_cache, put

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))


@pytest.fixture
def cache() -> BlockHashCache:
    return make_cache("block_hash", page_size=4)


def test_whole_pages_are_found_with_the_slots_that_came_first(cache: BlockHashCache) -> None:
    assert cache.insert(RadixKey(A + B), allocator_of(cache).alloc(8)) == 0
    slots = allocator_of(cache).alloc(12)
    assert cache.insert(RadixKey(A + B + C), slots) == 8
    assert find(cache, [*A, *B, *C, 9]).device_indices.tolist() == [*range(4, 12), *slots[8:].tolist()]
    assert [hit(cache, (A + B)[:n]) for n in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    key = RadixKey(A + B)
    assert [len(cache.match_prefix(key, limit).device_indices) for limit in (8, 7, 4, 3, 0, -1)] == [8, 4, 4, 0, 0, 0]


def test_a_page_is_found_only_behind_the_pages_that_it_was_computed_behind(cache: BlockHashCache) -> None:
    put(cache, A + B + C)
    assert [hit(cache, tokens) for tokens in (B, B + C, A + C, B + A, A + B + B)] == [0, 0, 4, 0, 8]


def test_a_namespace_enters_the_chain_at_its_head(cache: BlockHashCache) -> None:
    put(cache, A + B, extra_key="tenant")
    assert [hit(cache, A + B, extra_key=key) for key in (None, "", "tenan", "tenant")] == [0, 0, 0, 8]
    assert hit(cache, B, extra_key="tenant") == 0


def test_no_salt_stands_for_a_page(cache: BlockHashCache) -> None:
    """A page of small token ids is valid text: behind 32 zeros it looks like what the first page is hashed from."""
    page = b"".join(token.to_bytes(4, "little") for token in A)
    put(cache, A + B)
    for salt in (bytes(32) + page, page):
        assert hit(cache, B, extra_key=salt.decode()) == 0


def test_no_two_prefixes_share_a_digest(cache: BlockHashCache) -> None:
    """All sequences of up to 3 pages out of 3, in namespaces made to look like tokens, digests or nothing."""
    spaces = [None, "", "\0" * 32, "\x01\0\0\0" * 4, "a", "aa"]
    seen = {}
    for space, length in itertools.product(spaces, (1, 2, 3)):
        for pages in itertools.product(([0] * 4, A, [1, 0, 1, 0]), repeat=length):
            *_, digest = cache._digests(RadixKey([token for page in pages for token in page], space), length)
            assert seen.setdefault(digest, (space, pages)) == (space, pages)
    assert len(seen) == 6 * (3 + 9 + 27)


def test_digests_are_computed_once_and_go_on_with_the_key(cache: BlockHashCache) -> None:
    key = RadixKey(A + B[:2])
    assert len(cache._digests(key, 1)) == 1
    key.append(B[2:] + C)
    assert cache._digests(key, 3) == cache._digests(RadixKey(A + B + C), 3)
    assert cache._digests(key, 2) == cache._digests(RadixKey(A + B), 2)


def test_one_key_serves_caches_of_several_page_sizes(cache: BlockHashCache) -> None:
    other, key = make_cache("block_hash", page_size=2), RadixKey(A + B)
    for one in (cache, other):
        one.insert(key, allocator_of(one).alloc(8))
        assert len(one.match_prefix(key, 7).device_indices) == 8 - one.page_size
        assert hit(one, A + B) == 8, "what another key finds"


def test_the_deepest_block_of_a_chain_goes_first(cache: BlockHashCache) -> None:
    put(cache, A + B + C)
    assert [(cache.evict(1), hit(cache, A + B + C)) for _ in range(4)] == [(4, 8), (4, 4), (4, 0), (0, 0)]
    assert allocator_of(cache).available_size() == allocator_of(cache).size


def test_the_least_recently_used_chain_goes_first(cache: BlockHashCache) -> None:
    put(cache, A + B)
    put(cache, A + C)
    put(cache, D)
    find(cache, A + B)
    order = []
    while cache.evict(1):
        order.append([hit_without_touch(cache, tokens) for tokens in (A + B, A + C, D)])
    assert order == [[8, 4, 4], [8, 4, 0], [4, 4, 0], [0, 0, 0]]


def hit_without_touch(cache: BlockHashCache, tokens: list[int]) -> int:
    digests = cache._digests(RadixKey(tokens), len(tokens) // 4)
    return 4 * sum(digest in cache._blocks for digest in digests)


def test_a_lock_protects_the_chain_and_its_end_counts_as_use(cache: BlockHashCache) -> None:
    put(cache, A + B)
    node = find(cache, A + B).last_device_node
    cache.inc_lock_ref(node)
    cache.inc_lock_ref(find(cache, A).last_device_node)
    put(cache, C)
    assert (cache.evictable_size(), cache.protected_size()) == (4, 8)
    cache.dec_lock_ref(node)
    assert (cache.evictable_size(), cache.protected_size()) == (8, 4)
    assert cache.evict(4) == 4 and hit(cache, C) == 0 and hit(cache, A + B) == 8
    assert cache.evict(100) == 4 and hit(cache, A + B) == 4 and cache.num_evicted_tokens == 8
    cache.check_invariants()


def test_wrong_locks_are_our_bug(cache: BlockHashCache) -> None:
    put(cache, A)
    with pytest.raises(AssertionError, match="not locked"):
        cache.dec_lock_ref(find(cache, A).last_device_node)


def test_a_reset_forgets_everything(cache: BlockHashCache) -> None:
    put(cache, A + B)
    cache.reset()
    assert hit(cache, A) == 0 and cache.evictable_size() == cache.evict(8) == 0
    allocator_of(cache).clear()
    put(cache, A)
    cache.check_invariants()


def test_a_strategy_that_it_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction_policy='lfu'"):
        make_cache("block_hash", policy="lfu")


def test_less_than_a_page_is_not_cached(cache: BlockHashCache) -> None:
    assert cache.insert(RadixKey([1, 1, 1]), allocator_of(cache).alloc(0)) == 0
    assert cache.evictable_size() == 0


def test_everything_that_happens_is_told() -> None:
    tracer = Tracer()
    events, cache = Events(tracer), make_cache("block_hash", page_size=4, tracer=tracer)
    cache.insert(RadixKey(A + B), allocator_of(cache).alloc(8))
    cache.insert(RadixKey(A + C + D), allocator_of(cache).alloc(12))
    node = find(cache, A).last_device_node
    cache.inc_lock_ref(node)
    cache.evict(8)
    cache.dec_lock_ref(node)
    cache.reset()
    assert events.heard == [
        Inserted(
            node=2, parent=0, extra_key=None, insert_len=8, existing=0, token_ids=(*A, *B), pages=(1, 2), priority=0,
            last_access_time=None, evictable=8, protected=0,
        ),
        Inserted(
            node=5, parent=1, extra_key=None, insert_len=12, existing=4, token_ids=(*C, *D), pages=(4, 5), priority=0,
            last_access_time=None, evictable=16, protected=0,
        ),
        Locked(node=1, delta=1, num_tokens=4, last_access_time=None, evictable=12, protected=4),
        Evicted(asked=8, freed=8, nodes=(2, 5), token_counts=(4, 4), strategy="lru", evictable=4, protected=4),
        Locked(node=1, delta=-1, num_tokens=4, last_access_time=None, evictable=8, protected=0),
        CacheFlushed(evictable=8, protected=0),
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["a size", "an order", "a lock", "a page that is free", "a page twice"])
def test_the_invariants_notice(cache: BlockHashCache, what: str) -> None:
    put(cache, A + B)
    last = find(cache, A + B).last_device_node
    cache.check_invariants()
    match what:
        case "a size":
            cache._evictable += 4
        case "an order":
            cache._unlocked.move_to_end(last.digest)
        case "a lock":
            last.lock_ref = 1
        case "a page that is free":
            allocator_of(cache).free(find(cache, A).device_indices)
        case "a page twice":
            last.id = last.parent.id
    with pytest.raises(AssertionError):
        cache.check_invariants()
