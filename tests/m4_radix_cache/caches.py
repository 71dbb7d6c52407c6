"""Prefix caches over small checked pools, and short ways to speak to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool

CACHES = {"radix": RadixCache, "block_hash": BlockHashCache, "chunk": ChunkCache}
SHARING = ["radix", "block_hash"]
"""The caches that keep KV."""


def make_cache(
    kind: str = "radix",
    *,
    page_size: int = 1,
    num_pages: int = 64,
    policy: str = "lru",
    num_rows: int = 8,
    max_context_len: int = 256,
    tracer: Tracer | None = None,
) -> Any:
    """A cache of this kind over an allocator that notices every wrong free."""
    return CACHES[kind](
        req_to_token_pool=ReqToTokenPool(size=num_rows, max_context_len=max_context_len),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(
            size=num_pages * page_size, page_size=page_size, checked=True
        ),
        eviction_policy=policy,
        tracer=tracer or Tracer(),
    )


def allocator_of(cache: BasePrefixCache) -> TokenToKVPoolAllocator:
    return cache.token_to_kv_pool_allocator


def put(cache: BasePrefixCache, tokens: Sequence[int], *, extra_key: str | None = None, priority: int = 0) -> Slots:
    """Insert all tokens with new slots; what was there already is freed again. Returns the slots that it has now."""
    slots = allocator_of(cache).alloc(len(tokens))
    assert slots is not None
    existing = cache.insert(RadixKey(tokens, extra_key), slots, priority)
    allocator_of(cache).free(slots[:existing])
    return find(cache, tokens, extra_key=extra_key).device_indices


def find(cache: BasePrefixCache, tokens: Sequence[int], *, extra_key: str | None = None) -> MatchResult:
    return cache.match_prefix(RadixKey(tokens, extra_key))


def hit(cache: BasePrefixCache, tokens: Sequence[int], *, extra_key: str | None = None) -> int:
    """How many of the tokens are cached."""
    return len(find(cache, tokens, extra_key=extra_key).device_indices)


@dataclass
class FakeReq:
    """The least that a prefix cache wants of a request."""

    rid: str
    key: RadixKey
    rows: ReqToTokenPool
    priority: int = 0
    req_pool_idx: int | None = None
    prefix_indices: Slots = field(default_factory=lambda: NO_SLOTS)
    last_node: Any = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0

    @property
    def kv_allocated_len(self) -> int:
        return 0 if self.req_pool_idx is None else int(self.rows.lens[self.req_pool_idx])

    def forget_kv(self) -> None:
        self.req_pool_idx = self.last_node = None
        self.prefix_indices, self.cache_protected_len, self.kv_committed_len = NO_SLOTS, 0, 0


def admit(cache: BasePrefixCache, rid: str, tokens: Sequence[int], *, extra_key: str | None = None) -> FakeReq:
    """A request that has started from the cache and computed the rest; none of that is cached yet."""
    req = FakeReq(rid, RadixKey(tokens, extra_key, rid), cache.req_to_token_pool)
    match = cache.match_prefix(req.key, len(tokens) - 1)
    if match.last_device_node is not None:
        cache.inc_lock_ref(match.last_device_node)
    req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
    req.cache_protected_len = len(match.device_indices)
    rows = cache.req_to_token_pool.alloc(1)
    assert rows is not None
    req.req_pool_idx = rows[0]
    cache.req_to_token_pool.write(rows[0], 0, match.device_indices)
    extend(cache, req, len(tokens))
    return req


def extend(cache: BasePrefixCache, req: FakeReq, length: int) -> None:
    """Slots for the tokens up to `length`, as of a prefill; all of them count as computed."""
    start, row = req.kv_allocated_len, req.req_pool_idx
    assert row is not None
    last = cache.req_to_token_pool.read(row, start - 1, start) if start else np.array([-1])
    slots = allocator_of(cache).alloc_extend(np.array([start]), np.array([length]), last)
    assert slots is not None, "the test's pool is too small"
    cache.req_to_token_pool.write(row, start, slots)
    req.kv_committed_len = length


def decode(cache: BasePrefixCache, req: FakeReq, token: int) -> None:
    """One token more, computed."""
    req.key.append([token])
    extend(cache, req, len(req.key))


def row_of(cache: BasePrefixCache, req: FakeReq) -> list[int]:
    """The slots of all tokens that have one."""
    assert req.req_pool_idx is not None
    return cache.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()


def owned_by(cache: BasePrefixCache, reqs: Sequence[FakeReq]) -> int:
    """Slots in pages that these requests own themselves."""
    size = cache.page_size
    return sum(-(-req.kv_allocated_len // size) * size - req.cache_protected_len for req in reqs)


def audit(cache: BasePrefixCache, reqs: Sequence[FakeReq]) -> None:
    """Every slot has one owner: available + evictable + protected + owned = total."""
    cache.check_invariants()
    allocator = allocator_of(cache)
    parts = (allocator.available_size(), cache.evictable_size(), cache.protected_size(), owned_by(cache, reqs))
    assert sum(parts) == allocator.size, parts


class ForgetsSalts(RadixCache):
    """All requests share one namespace."""

    def match_prefix(self, key: Any, max_len: int | None = None) -> Any:
        key.extra_key = None
        return super().match_prefix(key, max_len)

    def insert(self, key: Any, value: Any, priority: int = 0) -> int:
        key.extra_key = None
        return super().insert(key, value, priority)
