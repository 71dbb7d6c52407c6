"""What every prefix cache can do, and what happens to a request's KV when it enters the cache.

m3 freed a request's KV when the request ended. A prefix cache keeps it: the next request that begins with the same
tokens starts from it. A request's slots then have up to three owners, side by side in its row:

    token      0            cache_protected_len        kv_committed_len      kv_allocated_len
               |  the cache's: locked   |  the request's own     |  without KV yet   |
               |  while it runs         |  (whole pages, tail)   |                   |

`cache_unfinished_req` and `cache_finished_req` move whole pages of the middle part to the left one. They are written
once, here, and speak to the cache through `match_prefix`, `insert` and the locks only. Of two requests that computed
the same tokens in one step the second finds them there: its own slots are duplicates, and only those are freed. SGLang:
`mem_cache/base_prefix_cache.py`; vLLM: `v1/core/kv_cache_manager.py` without an interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m4_radix_cache.events import CacheFlushed, DuplicatesFreed, Locked, Released
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator, Slots
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class MatchResult(NamedTuple):
    """The longest cached prefix. Safe to use only until the next `evict`, unless `last_device_node` is locked first."""

    device_indices: Slots
    """Slots of the matched tokens, a whole number of pages. Read only: it may be the cache's own array."""
    last_device_node: Any
    """Where the match ends: the handle for `inc_lock_ref`, `dec_lock_ref` and `record_hit`."""
    last_host_node: Any
    """The same until there is a cache in host memory."""
    host_hit_length: int = 0
    """Further tokens that are cached in host memory only."""


class CacheableReq(Protocol):
    """What a prefix cache reads and writes of a request."""

    @property
    def rid(self) -> str: ...

    @property
    def key(self) -> RadixKey:
        """Prompt and outputs, at least the committed tokens."""

    priority: int
    req_pool_idx: int | None
    """Its row."""
    prefix_indices: Slots
    """Slots of the tokens that need not be computed."""
    last_node: Any
    """The node that it has locked; None before its first match."""
    cache_protected_len: int
    """Tokens whose slots the cache owns, a whole number of pages."""
    kv_committed_len: int
    """Tokens whose KV has been computed."""

    @property
    def kv_allocated_len(self) -> int:
        """Tokens that have a slot."""

    def forget_kv(self) -> None:
        """Everything was given back: no row, no prefix, no node, all lengths 0."""


class BasePrefixCache(ABC):
    """KV that outlives its request. One thread uses it; times are counted operations, never a clock."""

    disable: ClassVar[bool] = False
    """True: it keeps nothing, so that to order requests by their prefixes is no use."""
    eviction_policies: ClassVar[Collection[str]] = STRATEGIES
    """Those that it knows."""

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        eviction_policy: str,
        tracer: Tracer,
    ) -> None:
        """Raises `ConfigError` for an eviction policy that this cache does not know."""
        if eviction_policy not in self.eviction_policies:
            known = ", ".join(self.eviction_policies)
            raise ConfigError(f"eviction_policy={eviction_policy!r} is none of those of {type(self).__name__}: {known}")
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self.page_bytes = self.page_size * TOKEN_BYTES
        """What a page takes in `RadixKey.data`."""
        self.eviction_policy = eviction_policy
        self.tracer = tracer
        self.num_evicted_tokens = 0
        """Tokens evicted so far, in all."""
        self._evictable = self._protected = 0
        self._start_empty()

    def reset(self) -> None:
        """Forget everything. All handles are void; the allocator is not told, its owner clears it."""
        self.tracer.emit(CacheFlushed, evictable=self._evictable, protected=self._protected)
        self._evictable = self._protected = 0
        self._start_empty()

    def evictable_size(self) -> int:
        """Cached tokens that no request has locked."""
        return self._evictable

    def protected_size(self) -> int:
        """Cached tokens that some request has locked."""
        return self._protected

    # --- what each cache does in its own way --------------------------------------------------------------------------

    @abstractmethod
    def _start_empty(self) -> None:
        """Begin anew, whatever state the cache was in."""

    @abstractmethod
    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """The longest cached prefix of the first `max_len` tokens, in whole pages.

        Refreshes the access times of what it finds, and may split a node; what is cached stays the same.
        """

    @abstractmethod
    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """Cache the first `len(value)` tokens of `key`, a whole number of pages, whose KV lies in `value`.

        Returns how many of them were there already. Of these the cache keeps the slots that it has, and the caller
        still owns those of `value`: nothing is freed here. The rest of `value` belongs to the cache now.
        """

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> None:
        """Protect `node` and all above it against eviction, once more. Its match must still be valid."""

    @abstractmethod
    def dec_lock_ref(self, node: Any) -> None:
        """Take one such protection back. Without any, the tokens are evictable; they stay until room is needed."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least so many unlocked tokens, if there are; returns how many. Voids matches that are not locked."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if the cache contradicts itself. Walks over everything."""

    def record_hit(self, node: Any) -> None:  # noqa: B027
        """A request starts from `node`. Strategies may ask how often that was; by default nobody does."""

    # --- a request's way into the cache -------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: CacheableReq) -> None:
        """Share what the request has computed so far, and let it go on from the cache's copy.

        Changes its row where the cache had the tokens already, frees its duplicates, moves its lock to the end of what
        is cached, and sets `prefix_indices`, `last_node` and `cache_protected_len`.
        """
        row = _row_of(req)
        slots = self.req_to_token_pool.read(row, 0, req.kv_committed_len)
        num_whole = len(slots) // self.page_size * self.page_size
        existing = self.insert(req.key, slots[:num_whole], req.priority)
        match = self.match_prefix(req.key, num_whole)
        cached = match.device_indices
        self.req_to_token_pool.write(row, req.cache_protected_len, cached[req.cache_protected_len :])
        self._move_lock(req, match.last_device_node)
        self._free_duplicates(req, slots, existing)  # now that no row names them
        req.prefix_indices = np.concatenate((cached, slots[len(cached) :]))  # the tail of a page is still its own
        req.cache_protected_len = len(cached)

    def cache_finished_req(self, req: CacheableReq, *, is_insert: bool = True) -> None:
        """The request ends: what it computed stays in the cache, everything else that it held is free.

        Without `is_insert` (an error, a retraction) its own tokens are freed, too. Afterwards it has no row, no lock
        and no KV.
        """
        row = _row_of(req)
        slots = self.req_to_token_pool.read(row, 0, req.kv_allocated_len)
        allocator = self.token_to_kv_pool_allocator
        allocator.free_group_begin()
        try:
            kept = req.cache_protected_len
            if is_insert:
                kept = req.kv_committed_len // self.page_size * self.page_size
                existing = self.insert(req.key, slots[:kept], req.priority)
                self._free_duplicates(req, slots, existing)
            own = slots[kept:]
            allocator.free(own)  # from a page boundary on: no page that the cache has is freed in part
            if len(own):
                self.tracer.emit(Released.of, req.rid, kept, own, self.page_size)
        finally:
            allocator.free_group_end()
        self.req_to_token_pool.free(row)
        self._move_lock(req, None)
        req.forget_kv()

    def _free_duplicates(self, req: CacheableReq, slots: Slots, existing: int) -> None:
        """The cache had `existing` tokens: of these, the request's own slots hold the same KV once more."""
        protected = req.cache_protected_len
        assert existing >= protected, f"{req.rid} has locked {protected} tokens, but only {existing} are cached"
        if existing > protected:
            self.token_to_kv_pool_allocator.free(slots[protected:existing])
            self.tracer.emit(DuplicatesFreed, rid=req.rid, start=protected, num_tokens=existing - protected)

    def _move_lock(self, req: CacheableReq, node: Any) -> None:
        """First the new lock, then the old one: what both protect is never without."""
        if node is req.last_node:
            return
        if node is not None:
            self.inc_lock_ref(node)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = node

    # --- what the caches have in common -------------------------------------------------------------------------------

    def _lock_moved(self, node_id: int, delta: int, num_tokens: int) -> None:
        """Book `num_tokens` that a lock has newly protected (`delta` 1) or no longer protects (-1).

        `node_id` is 0 for the root.
        """
        self._evictable -= delta * num_tokens
        self._protected += delta * num_tokens
        if node_id:
            sizes = {"evictable": self._evictable, "protected": self._protected}
            self.tracer.emit(Locked, node=node_id, delta=delta, num_tokens=num_tokens, **sizes)

    def _check_pages(self, pages: Slots) -> None:
        """What is cached stands in the cache once, and is not free."""
        assert len(np.unique(pages)) == len(pages), "a page is cached twice"
        owned = self.token_to_kv_pool_allocator.owned_pages()
        assert np.isin(pages, owned).all(), f"pages {np.setdiff1d(pages, owned)} are cached, but free"


def _row_of(req: CacheableReq) -> int:
    assert req.req_pool_idx is not None, f"{req.rid} has no row"
    return req.req_pool_idx
