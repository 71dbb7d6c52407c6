"""Build the eviction heap of m4: the candidates for eviction, of which the one with the smallest rank goes first.

Nodes become candidates, are used again and get another rank, or are locked and are no candidates any more, some
thousand times a second. A sorted list would be sorted as often. A heap finds the smallest entry at once, but cannot
find a node in its middle. So do not search: let an old entry stay, and pass it over when it is popped (lazy deletion).

Explained in docs/m4_radix_cache.md#lock-and-evict.

    cp starters/eviction_heap.py my_heap.py
    pytest --part eviction_heap=my_heap.py:MyEvictionHeap
"""

from collections.abc import Callable
from typing import Any


class MyEvictionHeap:
    """The candidates for eviction.

    A node has the fields `id`, an integer that is smaller for an older node, and `entry`, which is yours: None if and
    only if the node is no candidate. Two nodes cannot be compared.
    """

    def __init__(self, strategy: Callable[[Any], Any]) -> None:
        """`strategy`: from a node to its present rank, a value that can be compared. It changes when a node is used."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of candidates."""
        raise NotImplementedError

    def push(self, node: Any) -> None:
        """Make `node` a candidate with its present rank. If it is one already, its old rank is forgotten."""
        raise NotImplementedError

    def discard(self, node: Any) -> None:
        """Remove `node` from the candidates, if it is one."""
        raise NotImplementedError

    def pop(self) -> Any:
        """Remove and return the candidate with the smallest rank; of equal ranks the older node; None without
        candidates."""
        raise NotImplementedError
