"""A prefix cache at work without a model: requests are looked up, get slots, and leave their KV behind.

Each operation is what an engine does with a request, in this order: match, lock, evict if there is too little room,
take slots, insert, unlock. What would be computed in between costs nothing here, so this is the cache alone. Requests
come one after another; none of them runs beside another one.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache, TreeNode
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool

__all__ = ["BlockHashCache", "NoRoom", "RadixCache", "Server", "WalkingRadixCache", "num_entries"]


class NoRoom(Exception):
    """A request is longer than all the memory."""


class Server:
    """A cache with memory for `num_tokens` tokens, and requests that pass through it."""

    def __init__(
        self, cache_class: Callable[..., BasePrefixCache], *, num_tokens: int, page_size: int, policy: str = "lru"
    ) -> None:
        self.page_size = page_size
        self.allocator = TokenToKVPoolAllocator(size=num_tokens // page_size * page_size, page_size=page_size)
        self.cache = cache_class(
            req_to_token_pool=ReqToTokenPool(size=1, max_context_len=1),  # nobody runs, so there are no rows
            token_to_kv_pool_allocator=self.allocator,
            eviction_policy=policy,
            tracer=Tracer(),
        )

    def serve(self, key: RadixKey, num_prompt_tokens: int, priority: int = 0) -> int:
        """One request, from arrival to end; returns how many tokens of its prompt were cached.

        `key` has its prompt and its outputs. Raises `NoRoom` if it can never run.
        """
        cache, allocator = self.cache, self.allocator
        match = cache.match_prefix(key, num_prompt_tokens - 1)
        node, found = match.last_device_node, match.device_indices
        cache.inc_lock_ref(node)
        cache.record_hit(node)
        hit, num_whole = len(found), len(key) // self.page_size * self.page_size
        need = num_whole - hit
        if allocator.available_size() < need:
            cache.evict(need - allocator.available_size())
        slots = allocator.alloc(need)
        if slots is None:
            cache.dec_lock_ref(node)
            raise NoRoom(f"{len(key)} tokens in {allocator.size}")
        existing = cache.insert(key, np.concatenate((found, slots)), priority)
        if existing > hit:  # the whole prompt was there: its last page was computed again
            allocator.free(slots[: existing - hit])
        cache.dec_lock_ref(node)
        return hit


def num_entries(server: Server) -> int:
    """Nodes of the tree, or blocks of the table."""
    cache = server.cache
    if isinstance(cache, RadixCache):
        return len(list(cache.nodes()))
    assert isinstance(cache, BlockHashCache)
    return len(cache._blocks)


class WalkingRadixCache(RadixCache):
    """The same tree with an eviction that collects the leaves of the whole tree each time, as SGLang's does.

    It keeps no candidates, so it pays for none: everything else is the tree's own code.
    """

    def __init__(self, **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]
        self._candidates = _NoCandidates()  # type: ignore[assignment]
        self._rank = STRATEGIES[self.eviction_policy]

    def evict(self, num_tokens: int) -> int:
        """As the tree's, over a heap that is built anew."""
        heap = [(self._rank(leaf), leaf.id, leaf) for leaf in self._unlocked_leaves()]
        heapify(heap)
        freed, gone = 0, []
        while freed < num_tokens and heap:
            node = heappop(heap)[2]
            parent = node.parent
            assert parent is not None
            gone.append(node.value)
            freed += len(node.value)
            node.parent = None
            del parent.children[node.edge]
            if not parent.children and not parent.lock_ref:
                heappush(heap, (self._rank(parent), parent.id, parent))
        if gone:
            self._evictable -= freed
            self.num_evicted_tokens += freed
            self.token_to_kv_pool_allocator.free(np.concatenate(gone))
        return freed

    def _unlocked_leaves(self) -> Iterator[TreeNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif not node.lock_ref:
                yield node


class _NoCandidates:
    """Stands where the heap of candidates would."""

    def push(self, node: TreeNode) -> None:
        """Nobody keeps it."""

    def discard(self, node: TreeNode) -> None:
        """Nobody has it."""

    def clear(self) -> None:
        """There are none."""
