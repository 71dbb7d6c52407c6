"""Chained block hashes: the prefix behind a digest. Lookups and evictions: `test_prefix_cache_properties.py`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked
from m4_radix_cache.mem_cache.radix_key import RadixKey
from tests.m4_radix_cache.caches import allocator_of, find, hit, make_cache, put
from tests.support.engines import Recorder

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))


@pytest.fixture
def cache() -> BlockHashCache:
    return make_cache("block_hash", page_size=4)


def test_no_salt_stands_for_a_page(cache: BlockHashCache) -> None:
    """A page of small token ids is valid text: behind 32 zeros it looks like what the first page is hashed from."""
    page = b"".join(token.to_bytes(4, "little") for token in A)
    put(cache, A + B)
    for salt in (bytes(32) + page, page):
        assert hit(cache, B, extra_key=salt.decode()) == 0


def test_no_two_prefixes_share_a_page() -> None:
    """All sequences of 3 pages out of 3, in namespaces made to look like tokens, digests or nothing."""
    spaces = [None, "", "\0" * 32, "\x01\0\0\0" * 4, "a", "aa"]
    cache = make_cache("block_hash", page_size=4, num_pages=6 * (3 + 9 + 27) + 3)
    for space in spaces:
        for pages in itertools.product(([0] * 4, A, [1, 0, 1, 0]), repeat=3):
            put(cache, [token for page in pages for token in page], extra_key=space)
    assert cache.evictable_size() == 6 * (3 + 9 + 27) * 4


def test_one_key_serves_caches_of_several_page_sizes(cache: BlockHashCache) -> None:
    other, key = make_cache("block_hash", page_size=2), RadixKey(A + B)
    for one in (cache, other):
        one.insert(key, allocator_of(one).alloc(8))
        assert len(one.match_prefix(key, 7).device_indices) == 8 - one.page_size
        assert hit(one, A + B) == 8, "what another key finds"


def test_everything_that_happens_is_told() -> None:
    tracer = Tracer()
    recorder, cache = Recorder(tracer), make_cache("block_hash", page_size=4, tracer=tracer)
    cache.insert(RadixKey(A + B, rid="a"), allocator_of(cache).alloc(8))
    cache.insert(RadixKey(A + C + D), allocator_of(cache).alloc(12))
    node = find(cache, A).last_device_node
    cache.inc_lock_ref(node, "a")
    cache.evict(8, ["b", "c"])
    cache.dec_lock_ref(node, "a")
    cache.reset()
    assert [record.event for record in recorder.records] == [
        Inserted(
            rid="a", node=2, parent=0, extra_key=None, insert_len=8, existing=0, token_ids=(*A, *B), pages=(1, 2),
            priority=0, last_access_time=None, evictable=8, protected=0,
        ),
        Inserted(
            rid=None, node=5, parent=1, extra_key=None, insert_len=12, existing=4, token_ids=(*C, *D), pages=(4, 5),
            priority=0, last_access_time=None, evictable=16, protected=0,
        ),
        Locked(rid="a", node=1, delta=1, num_tokens=4, last_access_time=None, evictable=12, protected=4),
        Evicted(
            rids=("b", "c"), asked=8, freed=8, nodes=(2, 5), token_counts=(4, 4), strategy="lru", evictable=4,
            protected=4,
        ),
        Locked(rid="a", node=1, delta=-1, num_tokens=4, last_access_time=None, evictable=8, protected=0),
        CacheFlushed(evictable=8, protected=0),
    ]  # fmt: skip


FAULTS: dict[str, Callable[[BlockHashCache, Any], object]] = {
    "a size": lambda cache, last: setattr(cache, "_evictable", cache.evictable_size() + 4),
    "an order": lambda cache, last: cache._unlocked.move_to_end(last.digest),
    "a lock": lambda cache, last: setattr(last, "lock_ref", 1),
    "a page that is free": lambda cache, last: allocator_of(cache).free(find(cache, A).device_indices),
    "a page twice": lambda cache, last: setattr(last, "id", last.parent.id),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_invariants_notice(cache: BlockHashCache, fault: str) -> None:
    put(cache, A + B)
    last = find(cache, A + B).last_device_node
    cache.check_invariants()
    FAULTS[fault](cache, last)
    with pytest.raises(AssertionError):
        cache.check_invariants()
