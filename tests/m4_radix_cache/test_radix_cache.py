"""The tree by named behaviours: how nodes split, ranks of its leaves, its events.

Lookups, locks and evictions under every strategy: `test_prefix_cache_properties.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import allocator_of, find, hit, make_cache, put

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))
"""Four pages of 4 tokens."""


@pytest.fixture
def cache() -> RadixCache:
    return make_cache(page_size=4)


# --- insert -----------------------------------------------------------------------------------------------------------


def test_the_tree_has_its_own_copy_of_the_slots(cache: RadixCache) -> None:
    slots = allocator_of(cache).alloc(4)
    cache.insert(RadixKey(A), slots)
    slots[:] = 0
    assert find(cache, A).device_indices.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("num_slots", [3, 8])
def test_slots_that_are_no_whole_pages_of_the_key_are_our_bug(cache: RadixCache, num_slots: int) -> None:
    with pytest.raises(AssertionError, match="no whole pages"):
        cache.insert(RadixKey(A), np.arange(4, 4 + num_slots))


def test_the_upper_node_inherits_locks_hits_and_priority_and_is_new(cache: RadixCache) -> None:
    put(cache, A + B, priority=3)
    lower = find(cache, A + B).last_device_node
    cache.inc_lock_ref(lower)
    cache.record_hit(lower)
    upper = find(cache, A).last_device_node
    assert (upper.lock_ref, upper.hit_count, upper.priority) == (1, 1, 3)
    assert upper.creation_time > lower.creation_time and upper.last_access_time == lower.last_access_time


# --- evict ------------------------------------------------------------------------------------------------------------


def test_a_strategy_whose_ranks_fall_is_served_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most recently used: whoever is touched moves to the front, where an old entry must not hide it."""
    monkeypatch.setitem(STRATEGIES, "mru", lambda node: -node.last_access_time)
    cache = make_cache(page_size=4, policy="mru")
    for tokens in (A, B, C, D):
        put(cache, tokens)
    find(cache, B)
    cache.evict(1)
    assert [hit(cache, tokens) for tokens in (B, D)] == [0, 4]
    find(cache, A)
    cache.evict(1)
    assert [hit(cache, tokens) for tokens in (A, C, D)] == [0, 4, 4]


def test_an_eviction_does_not_look_at_the_whole_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand leaves; ranks are computed for those that changed, not for all."""
    asked: list[int] = []
    monkeypatch.setitem(STRATEGIES, "noted", lambda node: asked.append(node.id) or node.last_access_time)
    cache = make_cache(num_pages=1000, policy="noted")
    for token in range(1000):
        put(cache, [token])
    asked.clear()
    for token in range(100):
        find(cache, [token])
        cache.evict(1)
    assert len(asked) <= 300


def test_what_is_touched_again_and_again_does_not_fill_the_memory() -> None:
    cache = make_cache(num_pages=4)
    put(cache, [1])
    for _ in range(1000):
        find(cache, [1])
    assert len(cache._candidates._heap) < 100


# --- reset, and what can be seen --------------------------------------------------------------------------------------


def test_nodes_come_before_their_children_in_order_of_insertion(cache: RadixCache) -> None:
    for tokens in (B, A + B, A + C + D, A + C + A):
        put(cache, tokens)
    assert [node.key[0] for node in cache.nodes()] == [2, 1, 2, 3, 4, 1]


def move_elsewhere(first: Any, last: Any) -> None:
    """`first` has `last` under the name of another page."""
    del first.children[last.edge]
    first.children[b"elsewhere"] = last


FAULTS: dict[str, Callable[[RadixCache, Any, Any], object]] = {
    "a size": lambda cache, first, last: setattr(cache, "_evictable", cache.evictable_size() + 4),
    "a lock below without one above": lambda cache, first, last: setattr(last, "lock_ref", 1),
    "a candidate that is none": lambda cache, first, last: cache._candidates.push(first),
    "a leaf that is no candidate": lambda cache, first, last: cache._candidates.discard(last),
    "an old rank": lambda cache, first, last: setattr(last, "last_access_time", last.last_access_time + 1),
    "a page that is free": lambda cache, first, last: allocator_of(cache).free(last.value),
    "a page twice": lambda cache, first, last: setattr(last, "value", first.value),
    "slots that are no page": lambda cache, first, last: setattr(last, "value", last.value[::-1]),
    "tokens of another node": lambda cache, first, last: setattr(last, "key", first.key),
    "a child under another name": lambda cache, first, last: move_elsewhere(first, last),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_invariants_notice(cache: RadixCache, fault: str) -> None:
    put(cache, A + B)
    find(cache, A)
    cache.check_invariants()
    first, *_, last = cache.nodes()
    FAULTS[fault](cache, first, last)
    with pytest.raises((AssertionError, KeyError)):
        cache.check_invariants()
