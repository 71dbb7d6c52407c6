"""An answer from the web that is over at a certain time, however it comes.

The timeout of a socket is that of a single read: a server that sends its headers drop by drop, or leads through ten
redirects, could keep an engine waiting for hours. So here one point in time is set for the whole of a URL, and before
each read the socket is given what is left of it. vLLM: `aiohttp.ClientTimeout(total=...)` in `connections.py`.
"""

import io
import socket
import time
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, Request

LONGEST_S = 1e6  # sockets take no more than a C integer of nanoseconds


class Deadline:
    """A point in time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then. Raises `TimeoutError` if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left, LONGEST_S)


class _Reader(io.RawIOBase):
    """What a socket receives, until the deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Socket:
    """A connected socket as `http.client` uses it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        """Its only use is to read bytes."""
        return io.BufferedReader(_Reader(self._sock, self._deadline))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Connection(HTTPConnection):
    """To http, until the deadline."""

    def __init__(self, host: str, *, deadline: Deadline, **settings: Any) -> None:
        super().__init__(host, **settings)
        self.deadline = deadline

    def connect(self) -> None:
        self.timeout = self.deadline.left()
        super().connect()
        self.sock: Any = _Socket(self.sock, self.deadline)


class _SecureConnection(_Connection, HTTPSConnection):
    """To https: it connects as `HTTPSConnection` does."""


class TimedHTTPHandler(HTTPHandler):
    """urllib's, with a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_Connection, deadline=self.deadline), req)


class TimedHTTPSHandler(HTTPSHandler):
    """urllib's, with a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_SecureConnection, deadline=self.deadline), req)
