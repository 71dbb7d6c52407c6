"""Eviction order: the strategies, and the candidates in a heap.

A strategy is one function from a node to its rank; the smallest rank is evicted first. To find it, an eviction could
visit the whole tree, dozens of times a second in a full pool. Here the candidates, unlocked leaves, are kept in a heap.
An entry whose node has changed since is not searched for; it is discarded when it is popped (lazy deletion). m3 never
evicted. SGLang: `mem_cache/evict_policy.py`, and a heap built anew for each eviction; vLLM: a linked list in LRU order,
its only strategy.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from m4_radix_cache.mem_cache.tree_node import TreeNode

EvictionStrategy = Callable[[TreeNode], Any]
"""From a node to its rank: a value that can be compared and equals itself (NaN does not). It may depend on `id`,
`priority`, `hit_count`, `creation_time` and `last_access_time` only."""

PROBATION_HITS = 2
"""SLRU protects nodes from which at least this number of requests has started."""

STRATEGIES: dict[str, EvictionStrategy] = {
    "lru": lambda node: node.last_access_time,
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: node.creation_time,
    "slru": lambda node: (node.hit_count >= PROBATION_HITS, node.last_access_time),
    "priority": lambda node: (node.priority, node.last_access_time),
}
"""Least recently used; least frequently; first in, first out; segmented LRU; lowest priority. Ties: the older node."""


class EvictionHeap:
    """The candidates for eviction. A candidate whose rank changes must be pushed again."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self.strategy = strategy
        self._heap: list[tuple[Any, int, TreeNode]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, node: TreeNode) -> None:
        """Make `node` a candidate with its present rank. An older entry of it becomes invalid."""
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

    def discard(self, node: TreeNode) -> None:
        """Remove `node` from the candidates, if it is one."""
        if node.entry is not None:
            node.entry = None
            self._num_live -= 1

    def pop(self) -> Any:
        """Remove and return the candidate with the smallest rank; None without candidates."""
        while self._heap:
            entry = heappop(self._heap)
            node = entry[2]
            if node.entry is entry:
                self.discard(node)
                return node
        return None
