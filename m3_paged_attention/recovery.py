"""What must hold of queues and memory between two steps, and how to get there again after an interrupt.

Ctrl-C may come between any two lines. So there is one record of who is here, the scheduler's `requests`, and one of who
owns which blocks, the tables of the KV manager; queues, counts and marks follow from these two. m2 could simply go on,
because a slot keeps what is in it; here blocks may have been on their way. Neither vLLM nor SGLang recovers a step.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from m1_single_request.request import RequestStatus
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_manager_interface import PagedKVManager
from m3_paged_attention.request import Request
from m3_paged_attention.request_queue import PreemptedFirstQueue
from m3_paged_attention.scheduler_events import StepLost


def recover(
    requests: Collection[Request], running: Iterable[Request], kv_manager: PagedKVManager, tracer: Tracer
) -> tuple[list[Request], PreemptedFirstQueue]:
    """Who runs and who waits, if nobody knows how far the last step came. `requests` are all, in order of arrival.

    Whoever lacks the KV of its newest token only, and was not moved in memory, goes on where it is, on the device or on
    the host; everybody else starts over. All are sent in full again. Interrupted itself, it can be called again.
    """
    whole = [r for r in requests if 0 < r.sequence.num_computed_tokens == r.sequence.get_len() - 1]
    kv_manager.recover([r.request_id for r in whole if r.to_finish is None])  # drops whoever was moved
    owned, swapped = kv_manager.owned(), kv_manager.swapped()
    waiting, reset = PreemptedFirstQueue(), []
    for request in requests:
        request.is_sent = False
        if request.request_id in owned:
            continue
        if request.request_id not in swapped:
            if request.status is RequestStatus.RUNNING or request.sequence.num_computed_tokens:
                reset.append(request.request_id)
            request.sequence.num_computed_tokens = 0
        if request.status is RequestStatus.RUNNING:
            request.status = RequestStatus.PREEMPTED
        waiting.add_request(request)
    if tracer:
        tracer.emit(StepLost(reset=tuple(reset)))
    return [request for request in running if request.request_id in owned], waiting


def check_queues(requests: Mapping[str, Request], running: Sequence[Request], waiting: Sequence[Request]) -> None:
    """Raise AssertionError unless each request stands in one queue, those who ran before in front of all who wait."""
    ids = [request.request_id for request in (*waiting, *running)]
    assert sorted(ids) == sorted(requests), (ids, list(requests))
    assert all(request.status is RequestStatus.RUNNING for request in running)
    preempted = [request.number for request in waiting if request.status is RequestStatus.PREEMPTED]
    assert preempted == sorted(preempted), "the oldest arrival comes first"
    assert all(request.status is RequestStatus.PREEMPTED for request in waiting[: len(preempted)])


def check_memory(running: Sequence[Request], waiting: Iterable[Request], kv_manager: PagedKVManager) -> None:
    """Raise AssertionError unless exactly those who run own blocks, and as many as their tokens fill."""
    swapped = [request.request_id for request in waiting if kv_manager.is_swapped(request.request_id)]
    assert sorted(kv_manager.owned()) == sorted(request.request_id for request in running)
    assert sorted(kv_manager.swapped()) == sorted(swapped)
    for request in running:
        done = request.sequence.num_computed_tokens
        assert done == request.sequence.get_len() - 1, (request.request_id, done)
        num_blocks = len(kv_manager.block_ids(request.request_id))
        spare = num_blocks - kv_manager.blocks_for(done)  # for its next token, after a step that was lost
        assert spare == 0 or (spare == 1 and not request.is_sent), (request.request_id, num_blocks, done)
    kv_manager.check_invariants()
