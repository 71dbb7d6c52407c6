"""HTTP on one connection: uvicorn's protocol with limits for connections, and errors in the form of the API.

uvicorn has no limit on the time that a client takes to send its headers or to read its answer, and sends errors as
plain text. It stops reading a connection on which a second request comes before the first one is answered, and then
does not notice that the client closes it. Here such a request is dropped, and the connection is closed after the first
answer, which RFC 9112 (9.3.2) allows: the client sends it again. uvicorn's protocol on h11 limits the size of headers,
trailers and chunks; its other one, on httptools, does not. New in this milestone. vLLM and SGLang run uvicorn as it is.
"""

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from m7_serving.config import ServerConfig
from m7_serving.server.error_shape import RETRY_AFTER, Failure, failure


class HttpProtocol(H11Protocol):
    """uvicorn's protocol. It changes `connection_made`, `connection_lost`, `data_received`, `send_400_response`,
    `shutdown`, `pause_writing` and `resume_writing`."""

    def __init__(self, *arguments: Any, limits: ServerConfig, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or reject the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._reject(failure(503, "the server has too many connections", RETRY_AFTER, code="server_overloaded"))
        else:
            self._start_timer("headers", self.limits.header_timeout_s, self._on_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that concerns the connection."""
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. What follows one that is not answered yet is dropped."""
        if not self._has_whole_request:
            super().data_received(data)
            data = self.conn.trailing_data[0]
        if self._has_whole_request and data:
            self.cycle.keep_alive = False
            self.flow.resume_reading()  # so that a close by the client is noticed
        if self.conn.their_state is h11.IDLE:
            self._start_timer("headers", self.limits.header_timeout_s, self._on_slow_headers)
        else:
            self._stop_timer("headers")

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request; uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._reject(failure(431, f"the headers have more than {self.limits.max_header_bytes:,} bytes"))
        else:
            self._reject(failure(400, f"this is no valid HTTP request: {error or msg}"))

    def shutdown(self) -> None:
        """Close the connection, after the answer to a running request. Some releases of uvicorn end that one, too."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Begin to wait for a client that reads slower than its answer is made."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        self._stop_timer("write")

    def _watch_writing(self) -> None:
        """Abort the connection unless the buffer is smaller after the timeout; uvicorn goes on when it is nearly
        empty."""
        size = self.transport.get_write_buffer_size()

        def check() -> None:
            del self._timers["write"]
            if self.transport.get_write_buffer_size() < size:
                self._watch_writing()
            else:
                self.transport.abort()

        self._start_timer("write", self.limits.write_timeout_s, check)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        return self._is_answering and not self.cycle.more_body

    def _on_slow_headers(self) -> None:
        if self.conn.trailing_data[0]:
            self._reject(failure(408, f"the headers did not arrive within {self.limits.header_timeout_s:g} s"))
        self.transport.close()

    def _reject(self, rejected: Failure) -> None:
        """Answer without the application, unless an answer has begun, and close the connection."""
        if not (self._is_answering and self.cycle.response_started):
            body = msgspec.json.encode(rejected.body)
            headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
            status = f"HTTP/1.1 {rejected.status} {HTTPStatus(rejected.status).phrase}"
            lines = [status, *(f"{name}: {value}" for name, value in {**headers, **rejected.headers}.items())]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _start_timer(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, action)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()
