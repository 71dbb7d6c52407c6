"""The outputs of one request as an iterator: the result of `LLMEngine.stream`; `generate` and `generate_batch` use it.

Reading drives the engine: `next()` runs steps until this request has an output. Several streams can be read side by
side; each finds in its mailbox the outputs of steps that the others ran. vLLM: `RequestOutputCollector` of its async
engine.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

from m1_single_request.outputs import RequestOutput

Mailbox = deque[RequestOutput]


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request as they come.

    Closing it before the end aborts the request. If it is garbage-collected, the next call of the engine
    does so (`LLMEngine._begin_call`).
    """

    def __init__(
        self,
        request_id: str,
        *,
        read: Callable[[str, Mailbox], RequestOutput | None],
        close: Callable[[str, Mailbox], None],
        drop: Callable[[tuple[str, Mailbox]], None],
    ) -> None:
        """`read` runs steps until the mailbox has an output, and returns it; None if none will come. `close` and
        `drop` abort the request, now or at the engine's next call."""
        self.request_id = request_id
        self.mailbox: Mailbox = deque()
        self._read, self._close, self._drop = read, close, drop
        self._finished = False

    def __next__(self) -> RequestOutput:
        output = None if self._finished else self._read(self.request_id, self.mailbox)
        if output is None:
            raise StopIteration
        self._finished = output.finished
        del self.mailbox[0]  # after every call: an interrupted `next()` loses no output
        return output

    def is_ready(self) -> bool:
        """Return whether `next()` has an output at once, without a step."""
        return bool(self.mailbox)

    def close(self) -> None:
        """Abort the request if it has not finished; the next step releases what it holds."""
        if not self._finished:
            self._close(self.request_id, self.mailbox)
            self._finished = True

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be copied or pickled: its outputs can be read once")

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):  # the collector runs in any thread, and in the middle of a step
            self._drop((self.request_id, self.mailbox))
