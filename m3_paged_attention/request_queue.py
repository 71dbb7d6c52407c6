"""Where requests wait: those that ran before in front, the others in the order of their arrival.

m2's queue was a deque. A preempted request has a claim to be next, and so has an older one before a younger, however
they came to be here; so this queue is two. vLLM prepends to its `RequestQueue`; SGLang appends retracted requests.
"""

from collections import deque
from collections.abc import Collection, Iterator

from m1_single_request.request import RequestStatus
from m3_paged_attention.request import Request


class PreemptedFirstQueue:
    """First come, first served, twice."""

    def __init__(self) -> None:
        self._again: list[Request] = []  # preempted, oldest arrival first
        self._new: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Let a request wait: in front if it was preempted."""
        if request.status is RequestStatus.PREEMPTED:
            self._again = sorted([*self._again, request], key=lambda each: each.number)
        else:
            self._new.append(request)

    def peek_request(self) -> Request:
        """The next request; it stays. Raises IndexError if there is none."""
        return self._again[0] if self._again else self._new[0]

    def pop_request(self) -> Request:
        """Take out the next request. Raises IndexError if there is none."""
        return self._again.pop(0) if self._again else self._new.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out these requests, wherever they stand; one that is not here is no error."""
        gone = {id(request) for request in requests}
        self._again = [request for request in self._again if id(request) not in gone]
        self._new = deque(request for request in self._new if id(request) not in gone)

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._again
        yield from self._new
