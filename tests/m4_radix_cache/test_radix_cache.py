"""The tree by named behaviours: what is found, how nodes split, what a lock holds, and who goes first."""

import numpy as np
import pytest

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked, Split
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import Events, allocator_of, find, hit, make_cache, put

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))
"""Four pages of 4 tokens."""


@pytest.fixture
def cache() -> RadixCache:
    return make_cache(page_size=4)


def shape(cache: RadixCache) -> list[tuple[int, int]]:
    """Of each node its depth and its tokens, every node before its children."""
    depth = {id(cache.root): 0}
    nodes = []
    for node in cache.nodes():
        depth[id(node)] = depth[id(node.parent)] + 1
        nodes.append((depth[id(node)], len(node.value)))
    return nodes


# --- match and insert -------------------------------------------------------------------------------------------------


def test_an_empty_cache_finds_nothing(cache: RadixCache) -> None:
    match = find(cache, A + B)
    assert match.device_indices.tolist() == [] and match.device_indices.dtype == np.int64
    assert match.last_device_node is cache.root


def test_what_was_inserted_is_found_with_its_slots(cache: RadixCache) -> None:
    assert cache.insert(RadixKey(A + B), allocator_of(cache).alloc(8)) == 0
    match = find(cache, A + B + C)
    assert match.device_indices.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert cache.evictable_size() == 8 and cache.protected_size() == 0


def test_only_whole_pages_are_found(cache: RadixCache) -> None:
    put(cache, A + B)
    assert hit(cache, [*A, 2, 2, 2, 9]) == 4
    assert [hit(cache, (A + B)[:n]) for n in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_a_limit_cuts_the_question_to_whole_pages(cache: RadixCache) -> None:
    put(cache, A + B)
    lengths = [len(cache.match_prefix(RadixKey(A + B), limit).device_indices) for limit in (-1, 0, 3, 4, 7, 8, 99)]
    assert lengths == [0, 0, 0, 4, 4, 8, 8]


def test_an_insert_takes_the_slots_of_new_tokens_only_and_frees_nothing(cache: RadixCache) -> None:
    put(cache, A + B)
    slots = allocator_of(cache).alloc(12)
    free = allocator_of(cache).available_size()
    assert cache.insert(RadixKey(A + B + C), slots) == 8
    assert allocator_of(cache).available_size() == free, "the duplicates are the caller's"
    assert find(cache, A + B + C).device_indices.tolist() == [*range(4, 12), *slots[8:].tolist()]


def test_an_insert_of_what_is_there_changes_nothing(cache: RadixCache) -> None:
    put(cache, A + B + C)
    assert cache.insert(RadixKey(A + B), allocator_of(cache).alloc(8)) == 8
    assert cache.evictable_size() == 12 and hit(cache, A + B + C) == 12


def test_the_tree_has_its_own_copy_of_the_slots(cache: RadixCache) -> None:
    slots = allocator_of(cache).alloc(4)
    cache.insert(RadixKey(A), slots)
    slots[:] = 0
    assert find(cache, A).device_indices.tolist() == [4, 5, 6, 7]


def test_less_than_a_page_is_not_cached(cache: RadixCache) -> None:
    assert cache.insert(RadixKey([1, 1, 1]), allocator_of(cache).alloc(0)) == 0
    assert list(cache.nodes()) == []


@pytest.mark.parametrize("num_slots", [3, 8])
def test_slots_that_are_no_whole_pages_of_the_key_are_our_bug(cache: RadixCache, num_slots: int) -> None:
    with pytest.raises(AssertionError, match="no whole pages"):
        cache.insert(RadixKey(A), np.arange(4, 4 + num_slots))


def test_the_same_tokens_in_another_namespace_are_not_found(cache: RadixCache) -> None:
    put(cache, A + B, extra_key="tenant 1")
    assert [hit(cache, A + B, extra_key=key) for key in (None, "", "tenant 2", "tenant 1")] == [0, 0, 0, 8]
    put(cache, A + C, extra_key="tenant 2")
    put(cache, A)
    assert [hit(cache, A + C, extra_key=key) for key in ("tenant 1", "tenant 2", None)] == [4, 8, 4]
    assert cache.evictable_size() == 20


# --- split ------------------------------------------------------------------------------------------------------------


def test_a_node_is_split_where_two_sequences_part(cache: RadixCache) -> None:
    put(cache, A + B + C)
    assert shape(cache) == [(1, 12)]
    put(cache, A + B + D)
    assert shape(cache) == [(1, 8), (2, 4), (2, 4)]


def test_a_match_that_ends_inside_a_node_splits_it_at_a_page(cache: RadixCache) -> None:
    put(cache, A + B + C)
    match = find(cache, [*A, *B, 3, 3, 9])
    assert shape(cache) == [(1, 8), (2, 4)] and len(match.last_device_node.value) == 8
    assert cache.evictable_size() == 12 and hit(cache, A + B + C) == 12


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


def test_an_insert_raises_the_priority_of_what_it_passes(cache: RadixCache) -> None:
    put(cache, A + B, priority=1)
    put(cache, A, priority=5)
    upper, lower = cache.nodes()
    assert (upper.priority, lower.priority) == (5, 1)
    put(cache, A + B, priority=0)
    assert (upper.priority, lower.priority) == (5, 1)


# --- lock -------------------------------------------------------------------------------------------------------------


def test_a_lock_protects_the_whole_path_and_nothing_else(cache: RadixCache) -> None:
    for tokens in (A + B, A + C, D):
        put(cache, tokens)
    node = find(cache, A + B).last_device_node
    cache.inc_lock_ref(node)
    assert (cache.protected_size(), cache.evictable_size()) == (8, 8)
    assert cache.evict(100) == 8
    assert hit(cache, A + B) == 8 and hit(cache, A + C) == 4 and hit(cache, D) == 0
    cache.dec_lock_ref(node)
    assert (cache.protected_size(), cache.evictable_size()) == (0, 8)
    assert cache.evict(100) == 8 and list(cache.nodes()) == []


def test_locks_count(cache: RadixCache) -> None:
    put(cache, A)
    node = find(cache, A).last_device_node
    cache.inc_lock_ref(node)
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    assert cache.protected_size() == 4 and cache.evict(4) == 0
    cache.dec_lock_ref(node)
    assert cache.protected_size() == 0 and cache.evict(4) == 4


def test_the_root_can_be_locked_like_any_other(cache: RadixCache) -> None:
    """A request that finds nothing has it as its node."""
    cache.inc_lock_ref(cache.root)
    put(cache, A)
    assert cache.evict(4) == 4
    cache.dec_lock_ref(cache.root)
    assert cache.root.lock_ref == 1


def test_wrong_locks_are_our_bug(cache: RadixCache) -> None:
    put(cache, A)
    node = find(cache, A).last_device_node
    with pytest.raises(AssertionError, match="not locked"):
        cache.dec_lock_ref(node)
    cache.evict(4)
    for verb in (cache.inc_lock_ref, cache.record_hit):
        with pytest.raises(AssertionError, match="was evicted"):
            verb(node)


# --- evict ------------------------------------------------------------------------------------------------------------


def test_leaves_go_before_what_they_share(cache: RadixCache) -> None:
    for tokens in (A + B, A + C):
        put(cache, tokens)
    find(cache, A + B)
    assert [cache.evict(1) for _ in range(4)] == [4, 4, 4, 0]
    assert cache.evictable_size() == 0 and allocator_of(cache).available_size() == allocator_of(cache).size


def test_a_leaf_that_gets_a_child_is_no_candidate_any_more(cache: RadixCache) -> None:
    put(cache, A)
    put(cache, A + B)
    cache.check_invariants()
    assert cache.evict(1) == 4 and hit(cache, A + B) == 4


def test_an_eviction_takes_whole_leaves_until_it_has_enough(cache: RadixCache) -> None:
    for tokens in (A + B, C, D):
        put(cache, tokens)
    assert cache.evict(0) == 0
    assert cache.evict(5) == 8 and hit(cache, A) == 0
    assert cache.evict(5) == 8 and cache.num_evicted_tokens == 16


def test_evicted_slots_are_free_again(cache: RadixCache) -> None:
    slots = put(cache, A + B)
    cache.evict(8)
    with pytest.raises(PoolError):
        allocator_of(cache).free(slots)
    assert len(allocator_of(cache).owned_pages()) == 0


def test_a_stale_entry_does_not_come_back_when_its_slots_are_used_anew() -> None:
    cache = make_cache(page_size=4, num_pages=2)
    put(cache, A + B)
    cache.evict(8)
    put(cache, C + D)
    assert hit(cache, A + B) == 0 and hit(cache, C + D) == 8


def test_a_split_while_its_leaf_is_a_candidate_leaves_one_candidate(cache: RadixCache) -> None:
    put(cache, A + B)
    find(cache, A)
    cache.check_invariants()
    assert cache.evict(1) == 4 and hit(cache, A + B) == 4 and cache.evict(1) == 4


def first_out(policy: str) -> str:
    """Four leaves with histories; which of them goes first."""
    cache = make_cache(page_size=4, policy=policy)
    for tokens, priority in ((A, 2), (B, 2), (C, 1), (D, 9)):
        put(cache, tokens, priority=priority)
    for tokens, hits in ((B, 1), (C, 2), (D, 3), (A, 3)):  # A was inserted first and is used last
        for _ in range(hits):
            cache.record_hit(find(cache, tokens).last_device_node)
    before = {name: find(cache, tokens).device_indices[0] for name, tokens in zip("CDAB", (C, D, A, B), strict=True)}
    cache.evict(1)
    return next(name for name, slot in before.items() if slot // 4 not in allocator_of(cache).owned_pages())


@pytest.mark.parametrize(
    ("policy", "victim"),
    # In `first_out` they are last used in the order C, D, A, B. Hits: A 3, B 1, C 2, D 3.
    [("lru", "C"), ("lfu", "B"), ("fifo", "A"), ("slru", "B"), ("priority", "C")],
)
def test_each_strategy_has_its_victim(policy: str, victim: str) -> None:
    assert first_out(policy) == victim


def test_lfu_counts_requests_not_look_ups() -> None:
    """The scheduler looks waiting requests up again and again; only one that starts from a node is a hit."""
    cache = make_cache(page_size=4, policy="lfu")
    put(cache, A)
    put(cache, B)
    cache.record_hit(find(cache, B).last_device_node)
    for _ in range(9):
        find(cache, A)
    cache.evict(1)
    assert hit(cache, A) == 0 and hit(cache, B) == 4


def test_a_hit_counts_for_all_that_lies_above(cache: RadixCache) -> None:
    put(cache, A + B)
    put(cache, A + C)
    cache.record_hit(find(cache, A + B).last_device_node)
    assert {(bytes(node.key)[0], node.hit_count) for node in cache.nodes()} == {(1, 1), (2, 1), (3, 0)}


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


def test_equal_ranks_go_in_order_of_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "none", lambda node: 0)
    cache = make_cache(page_size=4, policy="none")
    for tokens in (B, A, C):
        put(cache, tokens)
    cache.evict(1)
    assert [hit(cache, tokens) for tokens in (A, B, C)] == [4, 0, 4]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction_policy='best' is none of those of RadixCache: lru, lfu, fifo"):
        make_cache(policy="best")


def test_an_eviction_does_not_look_at_the_whole_tree() -> None:
    """A thousand leaves; ranks are computed for those that changed, not for all."""
    cache, asked = make_cache(num_pages=1000), []
    cache._candidates.strategy = lambda node: asked.append(node.id) or node.last_access_time
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


def test_a_reset_forgets_everything_and_leaves_the_allocator_alone(cache: RadixCache) -> None:
    put(cache, A + B)
    cache.evict(4)
    put(cache, A + B)
    free = allocator_of(cache).available_size()
    cache.reset()
    assert hit(cache, A) == 0 and cache.evictable_size() == cache.protected_size() == 0 and cache.evict(4) == 0
    assert allocator_of(cache).available_size() == free and cache.num_evicted_tokens == 8
    allocator_of(cache).clear()
    assert len(put(cache, A)) == 4
    cache.check_invariants()


def test_nodes_come_before_their_children_in_order_of_insertion(cache: RadixCache) -> None:
    for tokens in (B, A + B, A + C + D, A + C + A):
        put(cache, tokens)
    assert [node.key[0] for node in cache.nodes()] == [2, 1, 2, 3, 4, 1]


def test_everything_that_happens_is_told() -> None:
    tracer = Tracer()
    events, cache = Events(tracer), make_cache(page_size=4, tracer=tracer)
    cache.insert(RadixKey(A + B, "t"), allocator_of(cache).alloc(8))
    cache.insert(RadixKey(A + C, "t"), allocator_of(cache).alloc(8), 5)
    node = find(cache, A + B, extra_key="t").last_device_node
    cache.inc_lock_ref(node)
    cache.inc_lock_ref(node)
    cache.evict(8)
    cache.dec_lock_ref(node)
    cache.dec_lock_ref(node)
    cache.reset()
    assert events.heard == [
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


def broken(cache: RadixCache, what: str) -> None:
    first, *_, last = cache.nodes()
    match what:
        case "a size":
            cache._evictable += 4
        case "a lock below without one above":
            last.lock_ref = 1
        case "a candidate that is none":
            cache._candidates.push(first)
        case "a leaf that is no candidate":
            cache._candidates.discard(last)
        case "an old rank":
            last.last_access_time += 1
        case "a page that is free":
            allocator_of(cache).free(last.value)
        case "a page twice":
            last.value = first.value
        case "slots that are no page":
            last.value = last.value[::-1]
        case "tokens of somebody else":
            last.key = first.key
        case "a parent that knows nothing of it":
            del first.children[last.edge]
            first.children[b"elsewhere"] = last


@pytest.mark.parametrize(
    "what",
    [
        "a size",
        "a lock below without one above",
        "a candidate that is none",
        "a leaf that is no candidate",
        "an old rank",
        "a page that is free",
        "a page twice",
        "slots that are no page",
        "tokens of somebody else",
        "a parent that knows nothing of it",
    ],
)
def test_the_invariants_notice(cache: RadixCache, what: str) -> None:
    put(cache, A + B)
    find(cache, A)
    cache.check_invariants()
    broken(cache, what)
    with pytest.raises((AssertionError, KeyError)):
        cache.check_invariants()
