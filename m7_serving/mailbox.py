"""Mailbox of a caller: one place for the newest output of each of its requests.

An output has everything that a request has produced so far, so a newer one takes the place of one that was not read. A
slow reader therefore delays no other request, and costs no memory (m1's mailboxes keep every output). New in this
milestone. vLLM: `RequestOutputCollector`; SGLang: `ReqState` of `TokenizerManager`.
"""

import asyncio

from m1_single_request.outputs import RequestOutput


class Mailbox:
    """The newest outputs of the requests of one call, by their index in it. Belongs to the event loop."""

    def __init__(self, request_ids: list[str]) -> None:
        self.unfinished = {request_id: index for index, request_id in enumerate(request_ids)}
        """Index of each request whose last output has not come."""
        self._newest: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._is_filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Replace the output of a request by a newer one."""
        index = self.unfinished[output.request_id]
        if output.finished:
            del self.unfinished[output.request_id]
        self._newest[index] = output
        self._is_filled.set()

    def fail(self, error: Exception) -> None:
        """Let the next `take` raise `error`. Outputs that were not read are dropped."""
        self._error = error
        self.unfinished.clear()
        self._is_filled.set()

    async def take(self) -> dict[int, RequestOutput]:
        """Return the outputs that are new since the last call, by index; wait for the first one. Empty after the last
        one. Raises the error of `fail`."""
        if self.unfinished or self._error is not None:
            await self._is_filled.wait()
        self._is_filled.clear()
        if self._error is not None:
            raise self._error
        newest, self._newest = self._newest, {}
        return newest
