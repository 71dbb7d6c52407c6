"""Priority preemption: a waiting request takes the place of running ones whose priority is much lower.

Retraction makes room for the next tokens of running requests, and the retracted request waits before all others. A
preempted request makes room for a more urgent one: it waits again at its own priority and arrival, and its KV goes to
the cache, from which it resumes. It keeps its tokens. Only requests of the running batch are preempted. Each of these
has a new token since it started or resumed, so every request ends. New in this milestone. SGLang:
`PrefillAdder.preempt_to_schedule`; vLLM preempts by priority only when memory runs out.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req


def may_preempt(waiting: Sequence[Req], running: Sequence[Req], threshold: int) -> bool:
    """Return whether a waiting request has a higher priority than a running one, by more than `threshold`."""
    if not waiting or not running:
        return False
    return max(req.priority for req in waiting) - min(req.priority for req in running) > threshold


def choose_victims(
    req: Req, running: Sequence[Req], threshold: int, freed: "FreedTokens", is_enough: Callable[[list[Req], int], bool]
) -> list[Req]:
    """Return the requests that `req` preempts: the lowest priority first, of equal ones the newest, until
    `is_enough(victims, num_freed)`. Empty if that is so without any, or not with all of them."""
    lower = [r for r in running if req.priority - r.priority > threshold]
    lower.sort(key=lambda r: (r.priority, -r.number))
    num_freed = [freed.num_tokens, *map(freed.add, lower)]
    number = bisect_left(range(len(num_freed)), True, key=lambda n: is_enough(lower[:n], num_freed[n]))
    return lower[:number] if number <= len(lower) else []


class FreedTokens:
    """Counts the tokens that become free or evictable when requests give back their KV, without changing anything.

    Tokens that another running request has locked too do not count.
    """

    def __init__(self, tree_cache: BasePrefixCache, needed: Any = None) -> None:
        """`needed`: the node of the prefix that the newcomer will lock; its tokens are not evictable any more."""
        self.tree_cache = tree_cache
        self._needed = set(path_to(needed))
        self._unlocked = Counter[Any]()  # by node: requests that have given it back
        self.num_tokens = -sum(tree_cache.node_len(node) for node in self._needed if not node.lock_ref)

    def add(self, req: Req) -> int:
        """Add the KV of a running request: its own pages, and cached ones that it has locked alone. Return the sum."""
        page_size = self.tree_cache.page_size
        self.num_tokens += -(-req.kv_allocated_len // page_size) * page_size - req.cache_protected_len
        for node in path_to(req.last_node):
            self._unlocked[node] += 1
            if self._unlocked[node] == node.lock_ref and node not in self._needed:
                self.num_tokens += self.tree_cache.node_len(node)
        return self.num_tokens


def path_to(node: Any) -> Iterator[Any]:
    """Yield a node of the cache and all above it but the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def give_back(victim: Req, tree_cache: BasePrefixCache) -> None:
    """Insert the KV of a preempted request into the cache, and free its row. KV that a step in flight still computes is
    not inserted, because that step may fail."""
    victim.kv_committed_len -= victim.num_in_flight
    victim.num_preemptions += 1
    tree_cache.cache_finished_req(victim)
