"""Limits of a request: middleware that checks its size, type and pace before and while the application reads it.

The application reads a body by `receive`, so that a body may be rejected before, or while, it is sent: its size is
checked also without a `Content-Length`, and a client that sends slowly is rejected after `body_timeout_s`. An answer to
a request whose body was not read closes the connection, because the rest of the body would be read as the next request.
New in this milestone. vLLM: `--h11-max-incomplete-event-size`, `validate_json_request`; it has no limit for bodies.
"""

import asyncio
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m7_serving.config import ServerConfig
from m7_serving.server.error_shape import Failure, failure

MAX_VALUES = 1_000_000
"""Maximum number of commas and brackets in a body. Each may begin a Python object, whose memory is 30 times the text,
and no other request is served while JSON is parsed."""
DISCARD_S = 2.0
"""Time for which the rest of a rejected body is read."""


class Limits:
    """ASGI middleware: rejects requests that are too large, too slow or not declared as JSON. While the server shuts
    down it closes the connection after every answer."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        body = Body(self.config, scope, receive)

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["app"].state.is_draining or not body.is_complete:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            elif not body.is_complete and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body"}
            await send(message)

        rejected = self._rejected(scope)
        if rejected is None:
            await self.app(scope, body.receive, send_and_close)
        else:
            await rejected.response(scope, receive, send_and_close)

    def _rejected(self, scope: Scope) -> Failure | None:
        """Return the answer to a request that the application may not have."""
        headers = dict(scope["headers"])
        sizes = (len(name) + len(value) + 4 for name, value in scope["headers"])  # with the colon and the line's end
        if len(scope["raw_path"]) + len(scope["query_string"]) + sum(sizes) > self.config.max_header_bytes:
            return failure(431, f"the headers have more than {self.config.max_header_bytes:,} bytes")
        if scope["method"] != "POST":
            return None
        # A page of any site can make a browser post to this server, but not with this type unless the server agrees.
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            return failure(415, "the body must be JSON: send the header `Content-Type: application/json`")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return failure(415, "a compressed body is not supported: send it without `Content-Encoding`")
        return None


class Body:
    """The body of a request while it is received."""

    def __init__(self, config: ServerConfig, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        self._config, self._receive = config, receive
        self._num_bytes = self._num_values = 0
        self._num_announced = int(headers.get(b"content-length", b"0"))
        self._deadline = asyncio.get_running_loop().time() + config.body_timeout_s
        self.is_complete = not self._num_announced and b"transfer-encoding" not in headers
        """Whether all of it was received."""

    async def receive(self) -> Message:
        """Receive a message of the client. Raises `HTTPException` for a body that is too large or too slow."""
        if self.is_complete:
            return await self._receive()
        self._check_size(self._num_announced)
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            seconds = f"{self._config.body_timeout_s:g} s"
            raise HTTPException(408, f"the body did not arrive within {seconds}") from None
        part = message.get("body", b"")
        self._num_bytes += len(part)
        self._check_size(self._num_bytes)
        self._num_values += sum(map(part.count, (b",", b"[", b"{")))
        if self._num_values > MAX_VALUES:
            raise HTTPException(413, f"the body has more than {MAX_VALUES:,} commas and brackets")
        self.is_complete = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read the rest, for a limited time: to close a socket with unread data resets the connection, and the client
        may lose the response."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while (await self._receive()).get("more_body", False):
                    pass

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._config.max_body_bytes:
            raise HTTPException(413, f"the body has more than {self._config.max_body_bytes:,} bytes")
