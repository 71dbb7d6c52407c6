"""Queue of waiting requests, in the order in which they leave it.

m1 had a bare deque. Here the order is a class of its own: override `add_request` to let other requests in first, and
create the queue in your `Scheduler`. vLLM: `v1/core/sched/request_queue.py`; SGLang sorts its `waiting_queue` by
`SchedulePolicy`.
"""

from collections import deque
from collections.abc import Collection
from typing import TypeVar

from m1_single_request.request import Request

RequestT = TypeVar("RequestT", bound=Request)


class FCFSRequestQueue(deque[RequestT]):
    """First-come-first-served queue: a deque, in which an operation at either end takes constant time."""

    def add_request(self, request: RequestT) -> None:
        """Add a new request."""
        self.append(request)

    def pop_request(self) -> RequestT:
        """Remove and return the next request. Raises IndexError if the queue is empty."""
        return self.popleft()

    def peek_request(self) -> RequestT:
        """Return the next request without removing it. Raises IndexError if the queue is empty."""
        return self[0]

    def remove_requests(self, requests: Collection[RequestT]) -> None:
        """Remove these requests; those that are not in the queue are ignored."""
        removed = {id(request) for request in requests}
        kept = [request for request in self if id(request) not in removed]
        self.clear()
        self.extend(kept)
