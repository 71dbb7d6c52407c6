"""Interface of the prefix caches, and the steps by which a request's KV enters one.

m3 freed a request's KV when the request ended. A prefix cache keeps it: the next request that begins with the same
tokens starts from it. A request's slots then have up to three owners, side by side in its row:

    token      0            cache_protected_len        kv_committed_len      kv_allocated_len
               |  the cache's: locked   |  the request's own     |  without KV yet   |
               |  while it runs         |  (whole pages, tail)   |                   |

`cache_unfinished_req` and `cache_finished_req` move whole pages of the middle part to the left one. They are written
once, here, and use only `match_prefix`, `insert` and the locks of the cache. Of two requests that computed the same
tokens in one step the second finds them cached: its own slots are duplicates, and only those are freed. SGLang:
`mem_cache/base_prefix_cache.py`; vLLM: `v1/core/kv_cache_manager.py` without an interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from m1_single_request.errors import ConfigError, shown
from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.events import CacheFlushed, DuplicatesFreed, Evicted, Locked, Released
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.request import Req

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class MatchResult(NamedTuple):
    """The longest cached prefix. Valid until the next `evict`; longer only if `last_device_node` is locked first."""

    device_indices: Slots
    """Slots of the matched tokens, a whole number of pages."""
    last_device_node: Any
    """The node at which the match ends: the argument of `inc_lock_ref`, `dec_lock_ref` and `record_hit`."""
    host_hit_length: int = 0
    """Number of further tokens that are only in host memory, and can be loaded."""
    last_host_node: Any = None
    """The node at which these end."""


class BasePrefixCache(ABC):
    """KV that outlives its request. For use by one thread; times are counted operations, not a clock.

    A cache changes the `prefix_indices`, `last_node` and `cache_protected_len` of requests.
    """

    disable: ClassVar[bool] = False
    """True: the cache keeps nothing, so that cache-aware orders have no use."""
    eviction_policies: ClassVar[Collection[str]] = STRATEGIES
    """Eviction policies that the cache supports."""
    keeps_retracted: ClassVar[bool] = False
    """True: the KV of a retracted request is inserted, because what is evicted is not lost."""

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        eviction_policy: str,
        tracer: Tracer,
    ) -> None:
        """Raises `ConfigError` for an eviction policy that this cache does not support."""
        if eviction_policy not in self.eviction_policies:
            known = ", ".join(self.eviction_policies)
            raise ConfigError(f"eviction_policy={eviction_policy!r} is none of those of {type(self).__name__}: {known}")
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self.page_key_bytes = self.page_size * TOKEN_BYTES
        """Size of a page in `RadixKey.data`."""
        self.eviction_policy = eviction_policy
        self.tracer = tracer
        self.num_evicted_tokens = self.num_loaded_tokens = self.num_disk_hit_tokens = 0
        """Tokens evicted from the device, loaded from host memory and read from a disk, since the start."""
        self._evictable = self._protected = 0
        self._start_empty()

    def reset(self) -> None:
        """Discard everything that is cached. All nodes are invalid after it; the allocator is cleared by its owner."""
        self.tracer.emit(CacheFlushed, evictable=self._evictable, protected=self._protected)
        self._evictable = self._protected = 0
        self._start_empty()

    def flush_tier(self, tier: str) -> None:
        """Discard what one tier has: `device`, `host` or `disk`; no request may use it. Raises `ConfigError` if there
        is no such tier. What only the device has may go to the host, by the cache's rules."""
        if tier != "device":
            raise ConfigError(f"flush_cache: tier={shown(tier)} is not configured: give the name of a tier, or none")
        self.evict(self._evictable)

    def evictable_size(self) -> int:
        """Return the number of cached tokens without a lock."""
        return self._evictable

    def protected_size(self) -> int:
        """Return the number of cached tokens with a lock."""
        return self._protected

    # --- implemented by each cache ------------------------------------------------------------------------------------

    @abstractmethod
    def _start_empty(self) -> None:
        """Make the cache empty."""

    @abstractmethod
    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """Return the longest cached prefix of the first `max_len` tokens, in whole pages.

        Sets the access times of the nodes on the path, and may split a node; the cached tokens stay the same.
        """

    @abstractmethod
    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """Cache the first `len(value)` tokens of `key`, a whole number of pages, whose KV lies in `value`.

        Returns the number of tokens that were cached already. Of these the cache keeps its own slots, and the caller
        still owns those of `value`: nothing is freed here. The rest of `value` belongs to the cache now.
        """

    @abstractmethod
    def inc_lock_ref(self, node: Any, rid: str | None = None) -> None:
        """Add a lock to `node` and all above it, which protects them from eviction. The match must still be valid.

        `rid`: id of the request that reads them, for the trace.
        """

    @abstractmethod
    def dec_lock_ref(self, node: Any, rid: str | None = None) -> None:
        """Remove one such lock. Tokens without a lock are evictable; they stay until an eviction."""

    @abstractmethod
    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Free at least `num_tokens` unlocked tokens, if there are so many; return the number of freed tokens.

        Matches that are not locked are invalid after it. `rids`: ids of the requests that need the room, for the trace.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if the cache is inconsistent. Visits all nodes."""

    def record_hit(self, node: Any, rid: str | None = None) -> None:  # noqa: B027
        """Count a request that starts from `node`, for eviction policies that use the count; by default none does.
        `rid`: its id, for the trace."""

    def begin_step(self) -> None:  # noqa: B027
        """A step begins: copies between tiers go on; by default there are none."""

    def load_back(self, req: Req) -> None:  # noqa: B027
        """Bring the tokens of a request that are only in host memory to the device; by default there are none."""

    def prefetch(self, req: Req) -> None:  # noqa: B027
        """Begin to read KV of a request that has arrived from a disk; by default there is none."""

    def is_waiting(self, req: Req) -> bool:
        """Return whether a request that has a place must not start yet, because KV of it is read from a disk."""
        return False

    def cancel_prefetch(self, rid: str) -> None:  # noqa: B027
        """Forget what is read for a request that ends before it starts."""

    def wait_for_disk(self) -> bool:
        """Wait for a moment if requests wait for a disk, and nothing else can run; return whether any does."""
        return False

    def tier_bytes(self) -> dict[str, int]:
        """Return the bytes of KV in host memory and on the disk, by field of `EngineStats`."""
        return {"host_bytes": 0, "disk_bytes": 0}

    def close(self) -> None:  # noqa: B027
        """End what runs beside the engine; may be called again."""

    def node_len(self, node: Any) -> int:
        """Return the number of tokens of a node below the root; by default a node is a page."""
        return self.page_size

    # --- a request's KV enters the cache ------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: Req) -> None:
        """Insert the computed whole pages of a running request, which continues on the cache's copy.

        Changes its row where the tokens were cached already, frees its duplicates, moves its lock to the end of the
        cached tokens, and sets `prefix_indices`, `last_node` and `cache_protected_len`.
        """
        row = row_of(req)
        slots = self.req_to_token_pool.read(row, 0, req.kv_committed_len)
        num_whole = len(slots) // self.page_size * self.page_size
        existing = self.insert(req.key, slots[:num_whole], req.priority)
        cached, node, *_ = self.match_prefix(req.key, num_whole)
        self.req_to_token_pool.write(row, req.cache_protected_len, cached[req.cache_protected_len :])
        self._move_lock(req, node)
        self._free_duplicates(req, slots, existing)  # no row contains them any more
        req.prefix_indices = np.concatenate((cached, slots[len(cached) :]))  # the tail of a page is still its own
        req.cache_protected_len = len(cached)

    def cache_finished_req(self, req: Req, *, is_insert: bool = True) -> None:
        """Insert the computed whole pages of a request that ends, and free all other slots, its row and its lock.

        Without `is_insert` (an error, a retraction) its own tokens are freed instead of inserted.
        """
        row = row_of(req)
        slots = self.req_to_token_pool.read(row, 0, req.kv_allocated_len)
        kept = req.cache_protected_len
        if is_insert:
            kept = req.kv_committed_len // self.page_size * self.page_size
            existing = self.insert(req.key, slots[:kept], req.priority)
            self._free_duplicates(req, slots, existing)
        own = slots[kept:]  # from a page boundary on: no cached page is freed in part
        self.token_to_kv_pool_allocator.free(own)
        if len(own):
            self.tracer.emit(Released.of, req.rid, kept, own, self.page_size)
        self.req_to_token_pool.free(row)
        self._move_lock(req, None)
        req.forget_kv()

    def _free_duplicates(self, req: Req, slots: Slots, existing: int) -> None:
        """Free the request's own slots among the first `existing` tokens, which were cached already."""
        protected = req.cache_protected_len
        assert existing >= protected, f"{req.rid} has locked {protected} tokens, but only {existing} are cached"
        if existing > protected:
            self.token_to_kv_pool_allocator.free(slots[protected:existing])
            self.tracer.emit(DuplicatesFreed, rid=req.rid, start=protected, num_tokens=existing - protected)

    def _move_lock(self, req: Req, node: Any) -> None:
        """Move the request's lock to `node`. The new lock comes first, so that shared nodes are never without one."""
        if node is req.last_node:
            return
        if node is not None:
            self.inc_lock_ref(node, req.rid)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.rid)
        req.last_node = node

    # --- shared by the caches -----------------------------------------------------------------------------------------

    def _lock_moved(self, node: Any, delta: int, num_tokens: int, rid: str | None) -> None:
        """Count `num_tokens` that a lock on `node` newly protects (`delta` 1) or no longer protects (-1)."""
        self._evictable -= delta * num_tokens
        self._protected += delta * num_tokens
        if node.parent is not None:
            self.tracer.emit(Locked.of, self, node, delta, num_tokens, rid)

    def _evicted(
        self, num_tokens: int, rids: Sequence[str], slots: Slots, nodes: Sequence[tuple[int, int]], freed: int
    ) -> int:
        """Free the pages of `freed` evicted tokens; return this number. `num_tokens`: number asked for. `slots`: at
        least one of each page. `nodes`: id and number of tokens of each node that the cache has no more."""
        self._evictable -= freed
        self.num_evicted_tokens += freed
        self.token_to_kv_pool_allocator.free(slots)
        if nodes:
            self.tracer.emit(Evicted.of, self, num_tokens, rids, nodes)
        return freed

    def _check_pages(self, pages: Slots) -> None:
        """Raise AssertionError if a page is cached twice, or cached and free."""
        assert len(np.unique(pages)) == len(pages), "a page is cached twice"
        owned = self.token_to_kv_pool_allocator.owned_pages()
        assert np.isin(pages, owned).all(), f"pages {np.setdiff1d(pages, owned)} are cached, but free"


def row_of(req: Req) -> int:
    """Return the row of a request that has one."""
    assert req.req_pool_idx is not None, f"{req.rid} has no row"
    return req.req_pool_idx
