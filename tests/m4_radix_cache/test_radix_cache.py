"""The tree by named behaviours: how nodes split, ranks of its leaves, its events.

Lookups, locks and evictions under every strategy: `test_prefix_cache_properties.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked, Split
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import allocator_of, find, hit, make_cache, put
from tests.support.engines import Recorder

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


# --- split ------------------------------------------------------------------------------------------------------------


def test_a_node_is_split_where_two_sequences_part(cache: RadixCache) -> None:
    put(cache, A + B + C)
    assert [len(node.value) for node in cache.nodes()] == [12]
    put(cache, A + B + D)
    upper, *lower = cache.nodes()
    assert [len(node.value) for node in (upper, *lower)] == [8, 4, 4] and {node.parent for node in lower} == {upper}


def test_a_handle_stays_valid_when_its_node_is_split(cache: RadixCache) -> None:
    """The old object keeps the tail, so its path is the whole prefix as before, locked all along."""
    put(cache, A + B + C)
    handle = find(cache, A + B + C).last_device_node
    cache.inc_lock_ref(handle)
    upper = find(cache, A).last_device_node
    assert len(handle.value) == 8 and handle.parent is upper and upper.lock_ref == 1
    assert cache.protected_size() == 12 and cache.evict(12) == 0
    cache.dec_lock_ref(handle)
    assert upper.lock_ref == handle.lock_ref == 0 and cache.evictable_size() == 12
    cache.check_invariants()


def test_the_upper_node_inherits_locks_hits_and_priority_and_is_new(cache: RadixCache) -> None:
    put(cache, A + B, priority=3)
    lower = find(cache, A + B).last_device_node
    cache.inc_lock_ref(lower)
    cache.record_hit(lower)
    upper = find(cache, A).last_device_node
    assert (upper.lock_ref, upper.hit_count, upper.priority) == (1, 1, 3)
    assert upper.creation_time > lower.creation_time and upper.last_access_time == lower.last_access_time


# --- lock -------------------------------------------------------------------------------------------------------------


def test_a_locked_node_stays_when_its_last_child_is_evicted(cache: RadixCache) -> None:
    put(cache, A + B)
    node = find(cache, A).last_device_node
    cache.inc_lock_ref(node)
    assert cache.evict(8) == 4 and hit(cache, A + B) == 4
    cache.dec_lock_ref(node)
    assert cache.evict(8) == 4 and hit(cache, A) == 0


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


def test_everything_that_happens_is_told() -> None:
    tracer = Tracer()
    recorder, cache = Recorder(tracer), make_cache(page_size=4, tracer=tracer)
    cache.insert(RadixKey(A + B, "t"), allocator_of(cache).alloc(8))
    cache.insert(RadixKey(A + C, "t"), allocator_of(cache).alloc(8), 5)
    node = find(cache, A + B, extra_key="t").last_device_node
    cache.inc_lock_ref(node)
    cache.inc_lock_ref(node)
    cache.evict(8)
    cache.dec_lock_ref(node)
    cache.dec_lock_ref(node)
    cache.reset()
    assert [record.event for record in recorder.records] == [
        Inserted(
            node=1, parent=0, extra_key="t", insert_len=8, existing=0, token_ids=(*A, *B), pages=(1, 2), priority=0,
            last_access_time=1, evictable=8, protected=0,
        ),
        Split(node=1, upper=2, head=4, tail=4, lock_ref=0, last_access_time=2),
        Inserted(
            node=3, parent=2, extra_key="t", insert_len=8, existing=4, token_ids=tuple(C), pages=(4,), priority=5,
            last_access_time=2, evictable=12, protected=0,
        ),
        Locked(node=1, delta=1, num_tokens=8, last_access_time=3, evictable=4, protected=8),
        Locked(node=1, delta=1, num_tokens=0, last_access_time=3, evictable=4, protected=8),
        Evicted(asked=8, freed=4, nodes=(3,), token_counts=(4,), strategy="lru", evictable=0, protected=8),
        Locked(node=1, delta=-1, num_tokens=0, last_access_time=3, evictable=0, protected=8),
        Locked(node=1, delta=-1, num_tokens=8, last_access_time=3, evictable=8, protected=0),
        CacheFlushed(evictable=8, protected=0),
    ]  # fmt: skip


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
