"""The tree and the block hashes alike: wrong locks, a reset, unknown strategies."""

from typing import Any

import pytest

from m1_single_request.errors import ConfigError
from tests.m4_radix_cache.caches import SHARING, allocator_of, find, hit, make_cache, put

A, B = [1] * 4, [2] * 4


@pytest.fixture(params=SHARING)
def cache(request: pytest.FixtureRequest) -> Any:
    return make_cache(request.param, page_size=4)


def test_wrong_locks_are_our_bug(cache: Any) -> None:
    put(cache, A)
    node = find(cache, A).last_device_node
    with pytest.raises(AssertionError, match="not locked"):
        cache.dec_lock_ref(node)


def test_an_evicted_node_of_the_tree_can_be_used_no_more() -> None:
    cache = make_cache(page_size=4)
    put(cache, A)
    node = find(cache, A).last_device_node
    cache.evict(4)
    for verb in (cache.inc_lock_ref, cache.record_hit):
        with pytest.raises(AssertionError, match="was evicted"):
            verb(node)


def test_a_reset_forgets_everything_and_leaves_the_allocator_alone(cache: Any) -> None:
    put(cache, A + B)
    cache.evict(4)
    put(cache, A + B)
    free, evicted = allocator_of(cache).available_size(), cache.num_evicted_tokens
    cache.reset()
    assert hit(cache, A) == 0 and cache.evictable_size() == cache.protected_size() == 0 and cache.evict(4) == 0
    assert allocator_of(cache).available_size() == free and cache.num_evicted_tokens == evicted > 0
    allocator_of(cache).clear()
    assert len(put(cache, A)) == 4
    cache.check_invariants()


@pytest.mark.parametrize(
    ("kind", "policy", "message"),
    [
        ("radix", "best", "eviction_policy='best' is none of those of RadixCache: lru, lfu, fifo"),
        ("block_hash", "lfu", "eviction_policy='lfu'"),
    ],
)
def test_a_strategy_that_it_has_not_is_refused(kind: str, policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cache(kind, policy=policy)
