"""Outputs on their way to their readers: those of streams in one mailbox each, all others for the next `step()`.

A step returns the outputs of many requests at once, and each has its own reader, so several streams and `step()` can be
used side by side. vLLM: `RequestOutputCollector` of its async engine.
"""

from collections import deque
from collections.abc import Mapping

from m1_single_request.outputs import RequestOutput

Mailbox = deque[RequestOutput]


class Mailboxes:
    """Keeps every output until it is taken."""

    def __init__(self) -> None:
        self._streams: dict[str, Mailbox] = {}  # by request id; without room if nobody reads the stream any more
        self._others: dict[str, RequestOutput] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a stream or the next `step()` has an output of this request to take, or a stream waits for one."""
        return request_id in self._streams or request_id in self._others

    def has_outputs_of_steps(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._others)

    def open(self, request_id: str, mailbox: Mailbox) -> None:
        """Deliver the outputs of this request to `mailbox`, up to its last one."""
        self._streams[request_id] = mailbox

    def is_open(self, request_id: str, mailbox: Mailbox) -> bool:
        """Whether the outputs of this request go to `mailbox`, and its last one was not taken yet."""
        return self._streams.get(request_id) is mailbox

    def deliver(self, outputs: Mapping[str, RequestOutput]) -> None:
        """Put every output where it belongs."""
        for request_id, output in outputs.items():
            mailbox = self._streams.get(request_id)
            if mailbox is None:
                self._others[request_id] = output
            elif output.finished and mailbox.maxlen == 0:
                del self._streams[request_id]
            else:
                mailbox.append(output)

    def take(self) -> dict[str, RequestOutput]:
        """Take the outputs that no stream reads."""
        outputs, self._others = self._others, {}
        return outputs

    def take_next(self, request_id: str, mailbox: Mailbox) -> RequestOutput:
        """Take the oldest output of a stream."""
        output = mailbox[0]
        if output.finished:
            del self._streams[request_id]
        del mailbox[0]
        return output

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Throw the outputs of this request away, those to come as well."""
        if mailbox and mailbox[-1].finished:
            del self._streams[request_id]
        else:
            self._streams[request_id] = deque(maxlen=0)

    def clear(self) -> None:
        """Throw everything away."""
        self._streams.clear()
        self._others.clear()
