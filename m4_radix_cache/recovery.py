"""What must hold of queues, batches and memory between two steps, and how to get there again after an interrupt.

Ctrl-C may come between any two lines. m3 knew of every block whose it was and could sort out the rest. A tree that is
being split, or slots on their way from a request to the cache, cannot be sorted out; so there are two ways back. If
the interrupt came while the model ran, the books are in order and only the KV of that step is doubtful: its requests
are sent back. If it came while the books were being written, nobody's KV is trusted: the cache is flushed and everybody
starts over. Either way no token changes, only time is lost. Neither vLLM nor SGLang recovers a step.
"""

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from m1_single_request.request import RequestStatus
from m3_paged_attention.scheduler_events import StepLost
from m4_radix_cache.events import Audit
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools

if TYPE_CHECKING:
    from m4_radix_cache.scheduler_base import SchedulerBase


class Phase(Enum):
    """How far the step has come."""

    IDLE = "idle"
    """No step is under way."""
    DECIDING = "deciding"
    """`schedule` has begun: the books are being written."""
    IN_FLIGHT = "in flight"
    """`schedule` is done, and its result has not come."""
    UPDATING = "updating"
    """The result is being booked."""


def recover(scheduler: "SchedulerBase") -> None:
    """The last step's result never came: send its requests back, or everybody. Interrupted itself, it starts over."""
    is_sound, scheduler.phase = scheduler.phase is Phase.IN_FLIGHT, Phase.DECIDING
    batch = scheduler.cur_batch
    if is_sound and batch is not None:
        lost = [req for req in batch.reqs if req.req_pool_idx is not None]
        if batch is scheduler.running_batch:
            scheduler.running_batch = scheduler.batch_class([], scheduler.pools)
        for req in lost:
            scheduler.tree_cache.cache_finished_req(req, is_insert=False)
    elif not is_sound:
        lost = [req for req in scheduler.requests.values() if req.status is not RequestStatus.WAITING]
        forget_everything(scheduler)
        for req in list(scheduler.exchange.held()):
            scheduler.exchange.let_go(req)
    else:
        lost = []
    for req in lost:
        if req.to_finish is None:
            req.num_retractions += 1
            req.status = RequestStatus.PREEMPTED
    elsewhere = {id(req) for req in scheduler.requests.values() if req.req_pool_idx is not None}
    elsewhere |= {id(req) for req in scheduler.exchange.held()}
    scheduler.waiting_queue = [req for req in scheduler.requests.values() if id(req) not in elsewhere]
    scheduler.marked = {req.rid: req for req in scheduler.requests.values() if req.to_finish is not None}
    scheduler.cur_batch, scheduler.batch_is_full = None, False
    if scheduler.tracer:
        scheduler.tracer.emit(StepLost(reset=tuple(req.rid for req in lost)))


def forget_everything(scheduler: "SchedulerBase") -> None:
    """Nobody has KV any more: all slots and rows are free, the cache is empty, no batch holds anybody."""
    pools = scheduler.pools
    pools.tree_cache.reset()
    pools.token_to_kv_pool_allocator.clear()
    pools.req_to_token_pool.clear()
    for req in scheduler.requests.values():
        req.forget_kv()
    scheduler.running_batch, scheduler.last_batch = scheduler.batch_class([], pools), None


def check_scheduler(scheduler: "SchedulerBase", prefilling: Req | None = None) -> None:
    """Raise AssertionError if queues, batches and memory contradict each other. Between two steps only.

    `prefilling`: a request of whose prompt only a part is computed (from m5 on).
    """
    batches = [scheduler.running_batch] + ([scheduler.last_batch] if scheduler.last_batch is not None else [])
    waiting = scheduler.waiting_queue
    elsewhere = list(scheduler.exchange.held())
    running = [
        req for batch in batches for req in batch.reqs if not req.finished() and not scheduler.exchange.holds(req)
    ]
    if prefilling is not None and prefilling not in running:
        running.append(prefilling)
    assert sorted(req.rid for req in [*waiting, *running, *elsewhere]) == sorted(scheduler.requests)
    assert len(running) <= scheduler.max_num_seqs
    assert all(req.status is RequestStatus.RUNNING and req.req_pool_idx is not None for req in running)
    assert all(req.status is not RequestStatus.RUNNING and req.req_pool_idx is None for req in waiting)
    for req in running:
        assert req.kv_committed_len == req.kv_allocated_len, (req.rid, req.kv_committed_len, req.kv_allocated_len)
        assert req.kv_committed_len == req.seqlen - 1 or req is prefilling, (req.rid, req.kv_committed_len)
        assert req.cache_protected_len % scheduler.pools.token_to_kv_pool_allocator.page_size == 0
    for batch in batches:
        columns = (batch.reqs, batch.req_pool_indices, batch.seq_lens, batch.output_ids)
        assert len({len(column) for column in columns}) == 1, [len(column) for column in columns]
        assert batch.sampling_info is None or len(batch.sampling_info) == len(batch.reqs)
    check_memory([*running, *(req for req in elsewhere if req.req_pool_idx is not None)], scheduler.pools)


def check_memory(running: list[Req], pools: Pools) -> None:
    """Raise AssertionError unless every page is free, the cache's or one request's, and locks are those who run."""
    allocator, cache, rows = pools.token_to_kv_pool_allocator, pools.tree_cache, pools.req_to_token_pool
    cache.check_invariants()
    shared, own = pages_of(running, pools)
    assert len(own) == len(set(own)) and 0 not in own, "two requests own the same page, or somebody owns page 0"
    in_use = set(allocator.owned_pages().tolist())
    assert shared | set(own) <= in_use, "a page is both free and mapped"
    assert not shared & set(own), "a request reads a page that another one owns"
    cached = cache.evictable_size() + cache.protected_size()
    total = allocator.available_size() + cached + len(own) * allocator.page_size
    assert total == allocator.size, f"{total} of {allocator.size} tokens are accounted for"
    assert rows.available_size() == rows.size - len(running)
    read = len(shared) * allocator.page_size
    assert cache.protected_size() == read, f"{cache.protected_size()} tokens are locked, and {read} are read"


def pages_of(running: list[Req], pools: Pools) -> tuple[set[int], list[int]]:
    """The pages that requests read from the cache, and those that each of them owns, one request after the other."""
    page_size = pools.token_to_kv_pool_allocator.page_size
    shared: set[int] = set()
    own: list[int] = []
    for req in running:
        assert req.req_pool_idx is not None
        pages = pools.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len) // page_size
        shared |= set(pages[: req.cache_protected_len].tolist())
        own += np.unique(pages[req.cache_protected_len :]).tolist()
    return shared, own


def audit(scheduler: "SchedulerBase") -> None:
    """Tell the trace the equation - what is free, cached and owned is all there is - and check everything."""
    if scheduler.tracer:
        _, own = pages_of(scheduler.running, scheduler.pools)
        allocator, cache = scheduler.pools.token_to_kv_pool_allocator, scheduler.tree_cache
        available, evictable, protected = allocator.available_size(), cache.evictable_size(), cache.protected_size()
        scheduler.tracer.emit(
            Audit(
                available=available,
                evictable=evictable,
                protected=protected,
                owned=len(own) * allocator.page_size,
                total=allocator.size,
            )
        )
    scheduler.check_invariants()
