"""Conditions that must hold of queues and blocks between two steps; the tests check them after every step.

m1 and m2 check theirs in their schedulers. Here a waiting request may own host blocks and a running one shared blocks,
so the conditions are in their own file. vLLM and SGLang check the pools when they are idle.
"""

from collections.abc import Iterable, Mapping, Sequence

from m1_single_request.request import RequestStatus
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.request import Request


def check_queues(requests: Mapping[str, Request], running: Sequence[Request], waiting: Sequence[Request]) -> None:
    """Raise AssertionError unless each request is in one queue, and preempted ones wait before all others."""
    ids = [request.request_id for request in (*waiting, *running)]
    assert sorted(ids) == sorted(requests), (ids, list(requests))
    assert all(request.status is RequestStatus.RUNNING for request in running)
    preempted = [request.number for request in waiting if request.status is RequestStatus.PREEMPTED]
    assert preempted == sorted(preempted), "the oldest arrival comes first"
    assert all(request.status is RequestStatus.PREEMPTED for request in waiting[: len(preempted)])


def check_memory(running: Sequence[Request], waiting: Iterable[Request], kv_manager: KVCacheManager) -> None:
    """Raise AssertionError unless exactly the running requests own device blocks, as many as their tokens fill."""
    swapped = [request.request_id for request in waiting if kv_manager.is_swapped(request.request_id)]
    assert sorted(kv_manager.owned()) == sorted(request.request_id for request in running)
    assert sorted(kv_manager.swapped()) == sorted(swapped)
    for request in running:
        done = request.sequence.num_computed_tokens
        assert done == request.sequence.get_len() - 1, (request.request_id, done)
        num_blocks = len(kv_manager.block_ids(request.request_id))
        assert num_blocks == kv_manager.blocks_for(done), (request.request_id, num_blocks, done)
    kv_manager.check_invariants()
