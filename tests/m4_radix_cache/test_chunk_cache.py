"""No sharing: every request is alone, and everything is free after it."""

import pytest

from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from tests.m4_radix_cache.caches import admit, allocator_of, audit, decode, find, make_cache, row_of


def test_it_says_that_it_shares_nothing() -> None:
    assert ChunkCache.disable and not RadixCache.disable


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_goes_on_from_its_own_kv_and_leaves_nothing(page_size: int) -> None:
    cache = make_cache("chunk", page_size=page_size)
    req = admit(cache, "a", [1, 2, 3, 4, 5, 6])
    slots = row_of(cache, req)
    cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == slots and req.cache_protected_len == 0
    decode(cache, req, 7)
    audit(cache, [req])
    cache.cache_finished_req(req)
    assert req.req_pool_idx is None and req.kv_allocated_len == 0 and len(req.prefix_indices) == 0
    assert allocator_of(cache).available_size() == allocator_of(cache).size
    assert cache.req_to_token_pool.available_size() == cache.req_to_token_pool.size


def test_nothing_is_ever_found() -> None:
    cache = make_cache("chunk")
    req = admit(cache, "a", [1, 2, 3])
    cache.cache_unfinished_req(req)
    for tokens in ([1, 2, 3], []):
        match = find(cache, tokens)
        assert len(match.device_indices) == 0 and match.last_device_node is None
    assert cache.evictable_size() == cache.protected_size() == cache.evict(9) == 0
    cache.reset()
    audit(cache, [req])


def test_it_takes_no_slots() -> None:
    cache = make_cache("chunk")
    req = admit(cache, "a", [1, 2, 3])
    with pytest.raises(NotImplementedError):
        cache.insert(req.key, allocator_of(cache).alloc(3))
