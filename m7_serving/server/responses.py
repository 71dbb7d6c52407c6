"""Responses that end with their client: a whole body, and a stream of server-sent events.

    receive() --- http.disconnect ---> cancel --+
                                                v
    generator of payloads --- await anext() --> send()

A client may close its connection at any moment. The work for its answer is a task beside another one that waits for
`http.disconnect`; whichever ends first ends the other. A cancelled task closes the engine's generator, which aborts the
request: one that waits or runs at the next step, and one that is being tokenized after that. Errors before the first
payload become HTTP errors, later ones an event. New in this milestone. vLLM: `with_cancellation`, `StreamingResponse`;
SGLang: `create_abort_task`, which aborts two seconds after the end of a stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from m7_serving.server.error_shape import failure_of

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""So that no cache and no proxy (nginx) holds back a part of a stream."""


class WholeResponse(Response):
    """A response whose body is computed when it is sent."""

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """`work` returns the body, as an object for JSON."""
        super().__init__()
        self.work, self.timeout_s = work, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute and send the answer. Raises the errors of the work, and `TimeoutError`."""
        await until_disconnect(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(self.timeout_s):
            body = await self.work
        await Response(msgspec.json.encode(body), media_type=self.media_type)(scope, receive, send)


class StreamedResponse(Response):
    """A stream of events, one for each payload of a generator, and `[DONE]` at the end, also after an error."""

    media_type = "text/event-stream"

    def __init__(self, payloads: AsyncGenerator[dict[str, Any], None], timeout_s: float | None) -> None:
        """`timeout_s`: of the whole stream; None: it has no limit."""
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]  # which `Response` has set to 0
        self.payloads, self.timeout_s = payloads, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises an error that comes before the first payload."""
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        deadline = None if self.timeout_s is None else asyncio.get_running_loop().time() + self.timeout_s
        async with aclosing(self.payloads) as payloads:
            async with asyncio.timeout_at(deadline):
                payload = await anext(payloads)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with asyncio.timeout_at(deadline):
                    await _send_event(send, payload)
                    async for payload in payloads:
                        await _send_event(send, payload)
            except Exception as error:
                await _send_event(send, failure_of(error).body)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client has closed its connection. The body must have been read."""
    tasks = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, payload: dict[str, Any]) -> None:
    event = b"data: " + msgspec.json.encode(payload) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})
