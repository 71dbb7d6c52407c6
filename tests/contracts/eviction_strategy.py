"""Contract of an eviction strategy of m4, segmented LRU: ranks of nodes, and what the tree evicts by them."""

from collections.abc import Sequence
from itertools import count, product
from random import Random
from typing import Any, ClassVar

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS
from m4_radix_cache.mem_cache.eviction import STRATEGIES, EvictionHeap
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.mem_cache.tree_node import TreeNode
from tests.contracts.part import Part, same

PART = Part(
    name="eviction_strategy",
    target="m4_radix_cache.mem_cache.eviction:STRATEGIES.slru",
    lesson="docs/m4_radix_cache.md#eviction-strategies",
    starter="my_slru",
    variant="m4_radix_cache-evicting",
    changes={"cache_config": {"eviction_policy": "slru", "debug": True}},
)


def node_of(hits: int, used: int, created: int = 0) -> TreeNode:
    """A node with this hit count, used at this time."""
    return TreeNode(1, None, b"", b"", NO_SLOTS, created, used, hit_count=hits)


def worded(node: TreeNode) -> str:
    hits = "1 hit" if node.hit_count == 1 else f"{node.hit_count} hits"
    return f"a node with {hits}, used at {node.last_access_time}"


def check_order(part: Any, first: TreeNode, second: TreeNode, hint: str) -> None:
    """`first` has the smaller rank."""
    on = f"{worded(first)}, and {worded(second)}"
    is_smaller = bool(part(first) < part(second))
    same(is_smaller, True, on=f"{on}: is the rank of the first smaller?", hint=hint)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_of_unused_nodes_the_older_use_goes_first(part: Any) -> None:
    """Of two nodes without a hit the one that was used longer ago has the smaller rank."""
    hint = "Inside a segment it is LRU: the smaller last_access_time has the smaller rank."
    check_order(part, node_of(0, 1), node_of(0, 2), hint)
    check_order(part, node_of(0, 9), node_of(0, 10), f"{hint} Times are numbers, not text.")
    check_order(part, node_of(0, 9, created=8), node_of(0, 10, created=1), hint)


def test_two_requests_protect_a_node(part: Any) -> None:
    """A node from which two requests started has a larger rank than any from which fewer did, however new that is."""
    hint = "From PROBATION_HITS hits on a node is protected. The segment comes before the time."
    check_order(part, node_of(0, 5), node_of(2, 5), hint)
    check_order(part, node_of(0, 1_000_000), node_of(2, 1), hint)
    check_order(part, node_of(0, 10**12), node_of(50, 1), f"{hint} No number added to a time is large enough.")


def test_one_request_protects_nothing(part: Any) -> None:
    """A node with one hit is on probation, as one without a hit is."""
    hint = "The first request computes a prefix, the second hits it. Only from the second hit on it is protected."
    check_order(part, node_of(1, 1_000_000), node_of(2, 1), hint)
    check_order(part, node_of(1, 1), node_of(0, 2), f"{hint} On probation the time decides, hit or not.")


def test_more_hits_protect_no_more(part: Any) -> None:
    """Of two protected nodes the one that was used longer ago has the smaller rank, whatever their hits."""
    hint = "The number of hits decides on the segment only. Otherwise old favourites stay for ever, as with LFU."
    check_order(part, node_of(100, 1), node_of(2, 2), hint)
    check_order(part, node_of(3, 1), node_of(2, 2), hint)


def test_equal_nodes_have_equal_ranks(part: Any) -> None:
    """A node that has not changed has the rank it had, and nodes of the same segment and time have equal ranks."""
    node = node_of(2, 5)
    first = part(node)
    part(node_of(0, 9))
    hint = "The rank is computed from the fields of the node alone: no counter, no clock, nothing that is kept."
    same(bool(part(node) == first), True, on=f"{worded(node)}, asked twice: are the ranks equal?", hint=hint)
    hint = "Inside a segment nothing but the time decides; of equal ranks the tree evicts the older node first."
    for one, other in ((node_of(0, 5), node_of(1, 5)), (node_of(2, 5), node_of(9, 5))):
        same(bool(part(one) == part(other)), True, on=f"{worded(one)}, and {worded(other)}: are they equal?", hint=hint)


def test_the_node_is_not_changed(part: Any) -> None:
    """Computing a rank changes no field of the node."""
    for hits in range(4):
        node = node_of(hits, 7, created=3)
        before = fields_of(node)
        part(node)
        hint = "The tree counts hits and lookups. A strategy only reads."
        same(fields_of(node), before, on=f"{worded(node)}: its fields after its rank was computed", hint=hint)


def fields_of(node: TreeNode) -> dict[str, int]:
    """What a strategy may read."""
    names = ("id", "hit_count", "last_access_time", "creation_time", "priority")
    return {name: getattr(node, name) for name in names}


def test_all_ranks_can_be_compared(part: Any) -> None:
    """The order of any nodes is first by segment, then by time."""
    nodes = [node_of(hits, used) for hits, used in product((0, 1, 2, 7), (0, 3, 12))]
    Random(0).shuffle(nodes)
    expected = sorted((node.hit_count >= 2, node.last_access_time) for node in nodes)
    got = [(node.hit_count >= 2, node.last_access_time) for node in sorted(nodes, key=part)]
    on = "12 nodes with 0, 1, 2 and 7 hits, used at 0, 3 and 12: (protected, time), sorted by rank"
    hint = "First the segment, then the time. Any two ranks can be compared, so they have the same form."
    same(got, expected, on=on, hint=hint)


# --- in the tree ------------------------------------------------------------------------------------------------------


def tree_with(strategy: Any, num_tokens: int) -> RadixCache:
    """An empty tree that evicts by a strategy, in a memory for so many tokens, each of which is a page."""

    class Tree(RadixCache):
        strategies: ClassVar = {"slru": strategy}

    return Tree(
        req_to_token_pool=ReqToTokenPool(size=1, max_context_len=8),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(size=num_tokens, page_size=1, checked=True),
        eviction_policy="slru",
        tracer=Tracer(),
    )


def ask(tree: RadixCache, tokens: Sequence[int]) -> int:
    """A request, from its lookup to its end. Return the number of tokens that it found in the cache."""
    key, allocator = RadixKey(tokens), tree.token_to_kv_pool_allocator
    found, node, *_ = tree.match_prefix(key)
    tree.inc_lock_ref(node)
    tree.record_hit(node)
    missing = len(tokens) - len(found)
    tree.evict(missing - allocator.available_size())
    slots = allocator.alloc(missing)
    assert slots is not None
    tree.insert(key, np.concatenate((found, slots)))
    tree.dec_lock_ref(node)
    tree.check_invariants()
    return len(found)


def test_the_tree_evicts_by_these_ranks(part: Any) -> None:
    """The tree evicts leaves on probation first, and then protected ones, each least recently used first."""
    tree = tree_with(part, 64)
    asked = {"A": 3, "B": 1, "C": 4, "D": 2}
    for letter, times in asked.items():
        for _ in range(times):
            ask(tree, [ord(letter)] * 8)
    gone = []
    for _ in asked:
        before = {node.key[0] for node in tree.nodes()}
        tree.evict(8)
        gone += [chr(letter) for letter in before - {node.key[0] for node in tree.nodes()}]
    hint = "A and C have 2 and 3 hits, and are protected; B has none, and D one. The first request of each computes it."
    on = "ask A three times, B once, C four times, D twice; evict one after the other"
    same(gone, ["B", "D", "A", "C"], on=on, hint=hint)


def test_a_scan_does_not_push_out_a_hot_prefix(part: Any) -> None:
    """A prefix that many requests use stays while long documents pass that are read once. LRU loses it."""
    on = "32 tokens; in each round a request with the same first 8 tokens, from round 4 on also 6 documents of 8 tokens"
    by_lru = hot_hits(STRATEGIES["lru"])
    hint = f"LRU gives {by_lru}: each document is newer. It is on probation, and the prefix must be protected."
    same(hot_hits(part), [0, 8, 8, 8, 8, 8, 8, 8], on=f"{on}; cached tokens of the first request", hint=hint)


def hot_hits(strategy: Any) -> list[int]:
    """In each of 8 rounds, the number of tokens that a request with the hot prefix finds."""
    tree, new, hits = tree_with(strategy, 32), count(1), []
    for number in range(8):
        if number >= 3:
            for _ in range(6):
                ask(tree, [next(new)] * 8)
        hits.append(ask(tree, [0] * 8 + [next(new)]))
    return hits


def test_a_protected_prefix_does_not_stay_for_ever(part: Any) -> None:
    """A protected prefix goes when others are protected, too, and are used instead of it."""
    tree, new = tree_with(part, 32), count(10)
    for prefix in (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4):
        ask(tree, [prefix] * 8 + [next(new)])
    hint = "Five hits long ago are worth less than two hits now: among protected nodes the time decides."
    found = [ask(tree, [prefix] * 8) for prefix in (4, 3, 1)]
    on = "32 tokens; ask prefix 1 five times, then 2, 3 and 4 three times each; then 4, 3 and 1: cached tokens"
    same(found, [8, 8, 0], on=on, hint=hint)


def test_the_heap_pops_in_the_right_order_after_many_changes(part: Any) -> None:
    """After any hits and lookups the node that goes is that of the smallest segment, time and id."""
    rng = Random(1)
    nodes = [TreeNode(number, None, b"", b"", NO_SLOTS) for number in range(8)]
    heap, live, done = EvictionHeap(part), dict[int, TreeNode](), list[str]()
    for time in range(400):
        node = rng.choice(nodes)
        if rng.random() < 0.7:
            node.last_access_time, node.hit_count = time // 3, node.hit_count + rng.randrange(2)
            heap.push(node)
            live[node.id] = node
            done.append(f"use node {node.id}: {node.hit_count} hits, time {time // 3}")
            continue
        wanted = min(live.values(), key=lambda one: (one.hit_count >= 2, one.last_access_time, one.id), default=None)
        got = heap.pop()
        done.append("pop")
        on = f"...; {'; '.join(done[-6:])}"
        used = ", ".join(f"{one.id} ({one.hit_count}, {one.last_access_time})" for one in live.values())
        hint = f"Before this pop there are these nodes, each with its hits and its time: {used or 'none'}."
        same(None if got is None else got.id, None if wanted is None else wanted.id, on=on, hint=hint)
        if wanted is not None:
            wanted.hit_count = 0
            del live[wanted.id]
