"""Step 2 of an image's way, if it names a web address: one deadline for the whole answer.

The timeout of a socket is that of a single read: a server that sends its headers byte by byte, or leads through ten
redirects, could block an engine for hours. So there is one deadline for a URL, and before each read the timeout of the
socket is set to the time that is left. vLLM: `aiohttp.ClientTimeout(total=...)` in `connections.py`.
"""

import io
import socket
import time
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, Request

from m6_multimodal_pd.multimodal.fetch_address import connect_to_public

LONGEST_S = 1e6  # a socket's timeout is a C integer of nanoseconds


class Deadline:
    """A point in time, and the streams that are read until then."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.streams: list[io.RawIOBase] = []

    def close(self) -> None:
        """Close the streams: a caller that keeps an error would keep them, and so the connection, open."""
        for stream in self.streams:
            stream.close()

    def left(self) -> float:
        """Return the seconds until then. Raises `TimeoutError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left, LONGEST_S)


class _Reader(io.RawIOBase):
    """The bytes of a socket until the deadline: `readable`, `readinto` and `close` of a raw stream."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)
        deadline.streams.append(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """http.client's response, which reads its headers and its content until the deadline."""

    def __init__(self, sock: socket.socket, *settings: Any, deadline: Deadline, **named: Any) -> None:
        super().__init__(sock, *settings, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Reader(sock, deadline))


class TimedHandler(HTTPHandler, HTTPSHandler):
    """urllib's handlers for http and https; a connection has one deadline for all that it reads."""

    def __init__(self, deadline: Deadline, is_public_only: bool) -> None:
        """`is_public_only`: whether to connect to public addresses only."""
        super().__init__()
        self.deadline, self.is_public_only = deadline, is_public_only

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, HTTPConnection), req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, HTTPSConnection), req)

    def _connection(self, kind: type[HTTPConnection], host: str, **settings: Any) -> HTTPConnection:
        """Return a connection whose responses are read until the deadline."""
        connection: Any = kind(host, **settings | {"timeout": self.deadline.left()})
        connection.response_class = partial(_Response, deadline=self.deadline)
        if self.is_public_only:
            connection._create_connection = connect_to_public  # which http.client has for its own tunnels
        return connection
