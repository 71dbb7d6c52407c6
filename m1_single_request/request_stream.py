"""The outputs of one request as an iterator: what `LLMEngine.stream` returns, and what the other calls read from.

Reading drives the engine: `next()` runs steps until this request has something new. Several streams can be read side by
side, each finds what the steps of the others left in its mailbox. vLLM: `RequestOutputCollector` of its async engine.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from m1_single_request.errors import EngineError, shown
from m1_single_request.outputs import RequestOutput

if TYPE_CHECKING:
    from m1_single_request.llm_engine import LLMEngine


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request as they come.

    Closing it before the end aborts the request. If it is only dropped, the next call of the engine does so.
    """

    def __init__(self, engine: "LLMEngine", request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._finished = False

    def __next__(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        while not self.is_ready():
            self._engine._advance()
        output = self._engine._mailboxes[self.request_id].popleft()
        if output.finished:
            self._finished = True
            del self._engine._mailboxes[self.request_id]
        return output

    def is_ready(self) -> bool:
        """Whether `next()` has an output at once, without a step. Raises `EngineError` if none will ever come."""
        self._engine._check_usable()
        if self._engine._mailboxes[self.request_id]:
            return True
        if not self._engine.engine_core.is_unfinished(self.request_id):
            raise EngineError(f"the outputs of {shown(self.request_id)} were lost: a step was interrupted on its way")
        return False

    def close(self) -> None:
        """Abort the request if it has not finished; what it held is released by the next step."""
        if not self._finished:
            self._engine._begin_call()
            self._engine._abandon(self.request_id)
            self._finished = True

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._finished:  # the collector runs in any thread, in a step too: the next call aborts it
            self._engine._dropped.append(self.request_id)
