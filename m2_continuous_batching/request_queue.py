"""Where requests wait for their turn, and the rule by which they leave.

m1 had a bare deque; from here on the rule has a name, so that later milestones can bring another one. vLLM:
`v1/core/sched/request_queue.py`; SGLang sorts its `waiting_queue` by `SchedulePolicy`.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from enum import Enum

from m1_single_request.request import Request


class SchedulingPolicy(Enum):
    """The rules by which waiting requests are chosen."""

    FCFS = "fcfs"
    """First come, first served."""


class RequestQueue(ABC):
    """Waiting requests in the order in which they will leave."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Let a newcomer wait, where the policy says."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take out the next request. Raises IndexError if there is none."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The next request; it stays. Raises IndexError if there is none."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put a request before all others: one that ran already and has to wait again (from m3 on)."""

    @abstractmethod
    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out these requests, wherever they stand; one that is not here is no error."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue(deque[Request], RequestQueue):
    """First come, first served: a deque, whose both ends cost the same however long it is."""

    def add_request(self, request: Request) -> None:
        self.append(request)

    def pop_request(self) -> Request:
        return self.popleft()

    def peek_request(self) -> Request:
        return self[0]

    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def remove_requests(self, requests: Collection[Request]) -> None:
        if requests:  # one pass, however many there are
            gone = {id(request) for request in requests}
            kept = [request for request in self if id(request) not in gone]
            self.clear()
            self.extend(kept)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue that follows `policy`."""
    queues: dict[SchedulingPolicy, type[RequestQueue]] = {SchedulingPolicy.FCFS: FCFSRequestQueue}
    return queues[policy]()
