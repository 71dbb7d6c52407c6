"""Contract of the eviction heap of m4: the candidates for eviction, in the order of their ranks."""

from random import Random
from types import SimpleNamespace
from typing import Any

from tests.contracts.part import Broken, Part, same

PART = Part(
    name="eviction_heap",
    target="m4_radix_cache.mem_cache.eviction:EvictionHeap",
    lesson="docs/m4_radix_cache.md#lock-and-evict",
    starter="MyEvictionHeap",
    variant="m4_radix_cache-evicting",
)


def node(number: int, rank: Any) -> Any:
    """A node with this id. `entry` is the heap's own field: None for a node that is no candidate."""
    return SimpleNamespace(id=number, rank=rank, entry=None, __repr__=lambda: f"node {number}")


def heap_of(part: Any, *ranks: Any) -> tuple[Any, list[Any]]:
    """A heap with nodes 0, 1, ... of these ranks, pushed in this order."""
    heap, nodes = part(lambda each: each.rank), [node(number, rank) for number, rank in enumerate(ranks)]
    for each in nodes:
        heap.push(each)
    return heap, nodes


def popped(heap: Any) -> list[int]:
    """The ids of all candidates, in the order in which they are popped."""
    ids = []
    while (each := heap.pop()) is not None:
        ids.append(each.id)
        if len(ids) > 1000:
            raise Broken("pop() until it returns None", "every candidate once", f"{ids[:12]} and so on, without end")
    return ids


def test_the_smallest_rank_is_popped_first(part: Any) -> None:
    """`pop` returns the candidate with the smallest rank, and removes it."""
    heap, _ = heap_of(part, 5, 1, 4, 2, 3)
    hint = "pop() returns the candidate with the smallest rank: it is evicted first."
    same(popped(heap), [1, 3, 4, 2, 0], on="push nodes 0 to 4 with ranks 5, 1, 4, 2, 3; pop all", hint=hint)


def test_an_empty_heap_has_nothing(part: Any) -> None:
    """`pop` of a heap without candidates returns None."""
    same(part(lambda each: each.rank).pop(), None, on="pop() of a new heap")
    heap, (only,) = heap_of(part, 1)
    heap.discard(only)
    same(heap.pop(), None, on="push a node, discard it, pop()", hint="A discarded node is no candidate any more.")


def test_of_equal_ranks_the_older_node_goes_first(part: Any) -> None:
    """Of two candidates with the same rank the one with the smaller id is popped first."""
    heap, nodes = heap_of(part, 1, 1, 1)
    for each in (nodes[2], nodes[0], nodes[1]):
        heap.discard(each)
    for each in (nodes[2], nodes[0], nodes[1]):
        heap.push(each)
    hint = "Nodes cannot be compared; their ids can, and an older node has a smaller id."
    same(popped(heap), [0, 1, 2], on="push nodes 2, 0, 1, all of rank 1; pop all", hint=hint)


def test_a_node_that_is_pushed_again_has_its_new_rank(part: Any) -> None:
    """A candidate that is pushed again has its present rank, and is popped once."""
    heap, nodes = heap_of(part, 1, 2, 3)
    nodes[0].rank = 9
    heap.push(nodes[0])
    hint = "An entry whose node was pushed again since is out of date: pop() has to pass it over."
    same(popped(heap), [1, 2, 0], on="ranks 1, 2, 3; node 0 gets rank 9 and is pushed again; pop all", hint=hint)
    heap, nodes = heap_of(part, 5, 6)
    nodes[1].rank = 1
    heap.push(nodes[1])
    same(popped(heap), [1, 0], on="ranks 5, 6; node 1 gets rank 1 and is pushed again; pop all", hint=hint)


def test_a_node_may_come_back(part: Any) -> None:
    """A node that was popped or discarded can be pushed again."""
    heap, nodes = heap_of(part, 1, 2)
    heap.pop()
    heap.discard(nodes[1])
    for each in nodes:
        heap.push(each)
    hint = "After pop() and discard() a node's `entry` is None: then push() adds it."
    same(popped(heap), [0, 1], on="push nodes 0 and 1; pop node 0, discard node 1; push both again; pop all", hint=hint)


def test_a_node_that_is_no_candidate_can_be_discarded(part: Any) -> None:
    """`discard` of a node that is no candidate does nothing."""
    heap, _ = heap_of(part, 1)
    stranger = node(7, 0)
    heap.discard(stranger)
    hint = "A node with `entry` None is no candidate, so there is nothing to count down."
    same((len(heap), popped(heap)), (1, [0]), on="push node 0; discard node 7, which was never pushed", hint=hint)


def test_the_length_is_that_of_the_candidates(part: Any) -> None:
    """`len` counts candidates, not entries: neither those that were discarded, nor a node twice."""
    heap, nodes = heap_of(part, 1, 2, 3)
    nodes[0].rank = 4
    heap.push(nodes[0])
    hint = "Entries that are out of date do not count. Keep a number of candidates of your own."
    same(len(heap), 3, on="push 3 nodes, one of them twice", hint=hint)
    heap.discard(nodes[1])
    heap.discard(nodes[1])
    same(len(heap), 2, on="then discard one, twice", hint=hint)
    heap.pop()
    same(len(heap), 1, on="then pop one", hint=hint)


def test_a_candidate_has_an_entry(part: Any) -> None:
    """`node.entry` is None if and only if the node is no candidate: the tree looks there."""
    heap, (first, second) = heap_of(part, 1, 2)
    is_candidate = [each.entry is not None for each in (first, second)]
    same(is_candidate, [True, True], on="push nodes 0 and 1; is `entry` set?")
    heap.pop()
    heap.discard(second)
    is_candidate = [each.entry is not None for each in (first, second)]
    hint = "pop() and discard() set `entry` to None."
    same(is_candidate, [False, False], on="then pop node 0 and discard node 1; is `entry` set?", hint=hint)


def test_it_does_not_grow_without_end(part: Any) -> None:
    """Entries that are out of date are removed at some time: ten candidates that are used a million times are ten."""
    heap, nodes = heap_of(part, *range(10))
    for number in range(20_000):
        each = nodes[number % 10]
        each.rank = number
        heap.push(each)
    stored = max((len(value) for value in vars(heap).values() if isinstance(value, list | dict | set)), default=0)
    hint = "When most entries are out of date, build the heap anew from those that are not."
    if stored > 1000:
        raise Broken("10 nodes, each pushed 2,000 times", "at most some hundred entries", f"{stored:,} entries", hint)


def test_it_is_right_after_many_changes(part: Any) -> None:
    """After any pushes, discards and pops the order is that of the ranks."""
    rng = Random(1)
    heap, nodes = part(lambda each: each.rank), [node(number, 0) for number in range(8)]
    live: dict[int, Any] = {}
    done: list[str] = []
    for _ in range(400):
        each, action = rng.choice(nodes), rng.random()
        if action < 0.6:
            each.rank = rng.randrange(20)
            heap.push(each)
            live[each.id] = each
            done.append(f"push node {each.id} with rank {each.rank}")
        elif action < 0.8:
            heap.discard(each)
            live.pop(each.id, None)
            done.append(f"discard node {each.id}")
        else:
            wanted = min(live.values(), key=lambda one: (one.rank, one.id), default=None)
            got = heap.pop()
            done.append("pop")
            on = "; ".join(done[-8:])
            ranks = ", ".join(f"node {one.id}: {one.rank}" for one in sorted(live.values(), key=lambda one: one.id))
            hint = f"Before this pop there are these candidates, with their ranks: {ranks or 'none'}."
            same(None if got is None else got.id, None if wanted is None else wanted.id, on=f"...; {on}", hint=hint)
            live.pop(-1 if wanted is None else wanted.id, None)
