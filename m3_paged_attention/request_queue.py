"""Queue of waiting requests: preempted requests first, then new requests, each in the order of arrival.

In m2 a request waited once. Preempted requests go before new ones, and among them the oldest arrival goes first,
whatever the order of preemption. vLLM prepends to its `RequestQueue`; SGLang appends retracted requests.
"""

from m1_single_request.request import RequestStatus
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m3_paged_attention.request import Request


class PreemptedFirstQueue(FCFSRequestQueue[Request]):
    """m2's queue, whose `add_request` puts a preempted request before all new ones."""

    def add_request(self, request: Request) -> None:
        """Add a request; a preempted one goes before new ones and before preempted ones that arrived later."""
        if request.status is not RequestStatus.PREEMPTED:
            super().add_request(request)
            return
        before = [r for r in self if r.status is RequestStatus.PREEMPTED and r.number < request.number]
        self.insert(len(before), request)
