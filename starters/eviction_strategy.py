"""Build an eviction strategy of m4: segmented LRU, by which one large scan does not empty the cache.

A strategy is a function from a node of the tree to its rank, and the leaf with the smallest rank is evicted first. LRU
takes the access time. Then a hundred documents that are read once push out a prefix that every request of a tenant
needs, because each document is newer. Segmented LRU has two segments: nodes on probation, from which fewer than two
requests have started, and protected ones. All of the first go before any of the second. It is hard because the rank is
all that you have: one value must order both segments, and inside each of them.

Explained in docs/m4_radix_cache.md#eviction-strategies.

    cp starters/eviction_strategy.py my_strategy.py
    pytest --part eviction_strategy=my_strategy.py:my_slru
"""

from typing import Any

from m4_radix_cache.mem_cache.eviction import PROBATION_HITS  # noqa: F401 - for you
from m4_radix_cache.mem_cache.tree_node import TreeNode


def my_slru(node: TreeNode) -> Any:
    """Return the rank of `node`: a value that can be compared with `<` and `==` with the rank of any other node.

    A node is protected if at least `PROBATION_HITS` requests have started from it (`node.hit_count`). Every node on
    probation has a smaller rank than every protected one. Of two nodes in the same segment the one that was used longer
    ago (`node.last_access_time`, a number of lookups) has the smaller rank, however many hits each has; with the same
    time the ranks are equal. The heap asks whenever a node is used, and compares the answers: so a node that has not
    changed has the rank it had, and nothing is changed by asking.
    """
    raise NotImplementedError
