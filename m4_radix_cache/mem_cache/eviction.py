"""What goes first when the cache must make room: strategies, and the candidates kept in order.

A strategy is one function: node in, rank out; the smallest rank goes first. To find the smallest, an eviction could
walk the whole tree, and would, dozens of times a second in a full pool. Here the candidates - leaves that nobody has
locked - stand in a heap. An entry whose node has changed since is not searched for; it is recognised when it comes up,
and thrown away (lazy deletion). m3 never evicted. SGLang: `mem_cache/evict_policy.py`, and a heap built anew for each
eviction; vLLM: a linked list in LRU order, the only strategy it has.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar


class Candidate(Protocol):
    """What strategies and the heap see of a tree node. Times are counted operations of the cache."""

    id: int
    last_access_time: int
    creation_time: int
    hit_count: int
    priority: int
    entry: tuple[Any, ...] | None  # the heap's: the one valid entry of this node, None if it is no candidate


EvictionStrategy = Callable[[Any], Any]
"""From a node to its rank, anything that can be compared and equals itself (NaN does not). It may depend on the fields
of `Candidate`, nothing else."""

PROBATION_HITS = 2
"""SLRU protects nodes from which at least so many requests have started."""

STRATEGIES: dict[str, EvictionStrategy] = {
    "lru": lambda node: node.last_access_time,
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: node.creation_time,
    "slru": lambda node: (node.hit_count >= PROBATION_HITS, node.last_access_time),
    "priority": lambda node: (node.priority, node.last_access_time),
}
"""Least recently used; least frequently; first in, first out; segmented LRU; lowest priority. Ties: the older node."""

Node = TypeVar("Node", bound=Candidate)


class EvictionHeap(Generic[Node]):
    """The candidates for eviction. Whoever changes a candidate's rank pushes it again."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self.strategy = strategy
        self._heap: list[tuple[Any, int, Node]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, node: Node) -> None:
        """Make `node` a candidate with its rank of now. An older entry of it is void."""
        rank, old = self.strategy(node), node.entry
        if old is None:
            self._num_live += 1
        elif old[0] == rank:
            return
        node.entry = entry = (rank, node.id, node)
        heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * self._num_live:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """`node` is no candidate any more; nothing happens if it was none."""
        if node.entry is not None:
            node.entry = None
            self._num_live -= 1

    def pop(self) -> Node | None:
        """Take out the candidate with the smallest rank; None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            node = entry[2]
            if node.entry is entry:
                self.discard(node)
                return node
        return None
