"""Queue of waiting requests: preempted requests first, then new requests, each in the order of arrival.

m2's queue was one deque. Preempted requests go before new ones, and among them the oldest arrival goes first, whatever
the order of preemption. So this queue consists of two. vLLM prepends to its `RequestQueue`; SGLang appends retracted
requests.
"""

from collections import deque
from collections.abc import Collection, Iterator

from m1_single_request.request import RequestStatus
from m3_paged_attention.request import Request


class PreemptedFirstQueue:
    """Two first-come-first-served queues: preempted requests, then new ones."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []  # oldest arrival first
        self._new: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Add a request; a preempted one goes before all new ones."""
        if request.status is RequestStatus.PREEMPTED:
            self._preempted = sorted([*self._preempted, request], key=lambda each: each.number)
        else:
            self._new.append(request)

    def peek_request(self) -> Request:
        """Return the next request without removing it. Raises IndexError if the queue is empty."""
        return self._preempted[0] if self._preempted else self._new[0]

    def pop_request(self) -> Request:
        """Remove and return the next request. Raises IndexError if the queue is empty."""
        return self._preempted.pop(0) if self._preempted else self._new.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Remove these requests; those that are not in the queue are ignored."""
        removed = {id(request) for request in requests}
        self._preempted = [request for request in self._preempted if id(request) not in removed]
        self._new = deque(request for request in self._new if id(request) not in removed)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        yield from self._new
