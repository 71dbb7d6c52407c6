"""Conditions of queues, batches and memory between two steps; the tests check them after every step.

m3's are about blocks of requests. Here pages may belong to the cache, and requests lock what they read of it. SGLang:
`Scheduler.self_check_during_idle`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from m1_single_request.request import RequestStatus
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools


def check_scheduler(scheduler: Any, waiting: Sequence[Req], running: Sequence[Req]) -> None:
    """Raise AssertionError if queues, batches and memory contradict each other. Between two steps only.

    `waiting`: all requests without a row. `running`: all requests with a row.
    """
    page_size = scheduler.pools.token_to_kv_pool_allocator.page_size
    assert sorted(req.rid for req in [*waiting, *running]) == sorted(scheduler.requests)
    assert len(running) <= scheduler.max_num_seqs
    assert all(req.status is not RequestStatus.RUNNING and req.req_pool_idx is None for req in waiting)
    for req in running:
        assert req.req_pool_idx is not None, req.rid
        assert req.cache_protected_len % page_size == 0, req.rid
        if req.status is RequestStatus.RUNNING:
            assert req.kv_committed_len == req.kv_allocated_len, (req.rid, req.kv_committed_len, req.kv_allocated_len)
    for req in scheduler.in_batches():
        assert req.kv_committed_len == req.seqlen - 1, (req.rid, req.kv_committed_len)
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            columns = (batch.reqs, batch.req_pool_indices, batch.seq_lens, batch.output_ids)
            assert len({len(column) for column in columns}) == 1, [len(column) for column in columns]
            assert batch.sampling_info is None or len(batch.sampling_info) == len(batch.reqs)
    check_memory(running, scheduler.pools)


def check_memory(running: Sequence[Req], pools: Pools) -> None:
    """Raise AssertionError unless each page is free, cached or owned by one request, and locked if requests read it."""
    allocator, cache, rows = pools.token_to_kv_pool_allocator, pools.tree_cache, pools.req_to_token_pool
    cache.check_invariants()
    shared, own = pages_of(running, pools)
    assert len(own) == len(set(own)) and 0 not in own, "two requests own the same page, or one owns page 0"
    in_use = set(allocator.owned_pages().tolist())
    assert shared | set(own) <= in_use, "a page is both free and mapped"
    assert not shared & set(own), "a request reads a page that another one owns"
    cached = cache.evictable_size() + cache.protected_size()
    total = allocator.available_size() + cached + len(own) * allocator.page_size
    assert total == allocator.size, f"{total} of {allocator.size} tokens are accounted for"
    assert rows.available_size() == rows.size - len(running)
    read = len(shared) * allocator.page_size
    assert cache.protected_size() == read, f"{cache.protected_size()} tokens are locked, and {read} are read"


def pages_of(running: Sequence[Req], pools: Pools) -> tuple[set[int], list[int]]:
    """Return the pages that requests read from the cache, and the pages that they own, request after request."""
    page_size = pools.token_to_kv_pool_allocator.page_size
    shared: set[int] = set()
    own: list[int] = []
    for req in running:
        assert req.req_pool_idx is not None
        pages = pools.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len) // page_size
        shared |= set(pages[: req.cache_protected_len].tolist())
        own += np.unique(pages[req.cache_protected_len :]).tolist()
    return shared, own
