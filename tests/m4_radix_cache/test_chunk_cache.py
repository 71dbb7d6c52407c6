"""No sharing: every request is alone, and everything is free after it."""

import pytest

from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from tests.m4_radix_cache.caches import admit, allocator_of, make_cache


def test_it_says_that_it_shares_nothing() -> None:
    assert ChunkCache.disable and not RadixCache.disable


def test_it_takes_no_slots() -> None:
    cache = make_cache("chunk")
    req = admit(cache, "a", [1, 2, 3])
    with pytest.raises(NotImplementedError):
        cache.insert(req.key, allocator_of(cache).alloc(3))
