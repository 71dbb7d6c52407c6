"""The living batch by itself: what a step needs of it, and that its arrays stay as long as its list of requests."""

import numpy as np
import pytest

from m1_single_request.errors import PartError
from m1_single_request.request import RequestStatus
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from tests.m4_radix_cache.batches import SETTINGS, extend, pools_of, req_of
from tests.m4_radix_cache.caches import make_cache, put


def say(batch: ScheduleBatch, *token_ids: int) -> None:
    """What the scheduler does when a step's tokens come."""
    rids = [req.rid for req in batch.reqs]
    reqs, tokens = batch.take_tokens(ModelRunnerOutput(rids, [[token] for token in token_ids], [[None]] * len(rids)))
    for req, token in zip(reqs, tokens, strict=True):
        req.kv_committed_len = req.kv_allocated_len
        req.sequence.add_token_id(token)
        if batch.forward_mode is ForwardMode.EXTEND:
            batch.pools.tree_cache.cache_unfinished_req(req)


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_pages", "num_rows"), [(2, 8), (64, 1)], ids=["slots", "rows"])
def test_a_batch_that_finds_no_room_changes_nothing_and_says_so(num_pages: int, num_rows: int) -> None:
    pools = pools_of(make_cache(page_size=2, num_pages=num_pages, num_rows=num_rows))
    reqs = [req_of(pools, "a", [1, 2, 3]), req_of(pools, "b", [4, 5, 6])]
    with pytest.raises(PartError, match="2 requests were admitted, and the KV memory has no room for them"):
        extend(pools, reqs)
    allocator, rows = pools.token_to_kv_pool_allocator, pools.req_to_token_pool
    assert allocator.available_size() == allocator.size and rows.available_size() == rows.size
    assert all(req.req_pool_idx is None for req in reqs)


def test_a_batch_with_nothing_to_compute_is_refused_and_takes_nothing() -> None:
    pools = pools_of(make_cache())
    req = req_of(pools, "a", [1, 2, 3])
    req.extend_input_len = 0
    with pytest.raises(PartError, match="nothing is left to compute of a"):
        extend(pools, [req])
    allocator, rows = pools.token_to_kv_pool_allocator, pools.req_to_token_pool
    assert allocator.available_size() == allocator.size and rows.available_size() == rows.size


def test_an_extend_evicts_exactly_what_it_lacks() -> None:
    pools = pools_of(make_cache(num_pages=8))
    put(pools.tree_cache, [1, 2, 3]), put(pools.tree_cache, [4, 5, 6])
    extend(pools, [req_of(pools, "a", [7, 8, 9])])
    assert pools.tree_cache.num_evicted_tokens == 3, "2 were free, and a leaf goes whole"
    assert len(pools.tree_cache.match_prefix(req_of(pools, "b", [4, 5, 6, 7]).key).device_indices) == 3


# --- decode -----------------------------------------------------------------------------------------------------------


def test_room_for_the_next_tokens_is_made_by_eviction() -> None:
    pools = pools_of(make_cache(num_pages=6))
    put(pools.tree_cache, [9, 8, 7])
    batch = extend(pools, [req_of(pools, "a", [1, 2, 3])])
    say(batch, 70)
    assert batch.room() == (1, 3)
    assert batch.check_decode_mem() and pools.tree_cache.num_evicted_tokens == 3
    assert batch.room() == (1, 3)


# --- who is in it -----------------------------------------------------------------------------------------------------


def running(pools: Pools, names: str, first: int = 0) -> ScheduleBatch:
    """A batch of requests that have said one token each."""
    reqs = [
        req_of(pools, name, [first + 10 * i, first + 10 * i + 1], **SETTINGS[(first + i) % len(SETTINGS)])
        for i, name in enumerate(names)
    ]
    batch = extend(pools, reqs)
    say(batch, *range(90, 90 + len(names)))
    for req in reqs:
        req.status = RequestStatus.RUNNING
    return batch


def test_tokens_may_come_in_any_order_and_not_for_everybody() -> None:
    pools = pools_of(make_cache())
    batch = running(pools, "abc")
    reqs, tokens = batch.take_tokens(ModelRunnerOutput(["c", "a"], [[5], [6]], [[None], [None]]))
    assert [req.rid for req in reqs] == ["c", "a"] and tokens == [5, 6]
    assert batch.output_ids.tolist() == [6, 0, 5]


def test_an_eviction_is_asked_for_only_where_room_is_missing() -> None:
    pools = pools_of(make_cache(num_pages=8))
    put(pools.tree_cache, [1, 2, 3])
    assert pools.make_room(5, []) and pools.tree_cache.num_evicted_tokens == 0
    assert not pools.make_room(9, []) and pools.tree_cache.num_evicted_tokens == 3
    assert np.array_equal(pools.token_to_kv_pool_allocator.owned_pages(), [])
