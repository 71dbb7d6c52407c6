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

LONGEST_S = 1e6  # a socket's timeout is a C integer of nanoseconds


class Deadline:
    """A point in time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

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
        """Return a stream of bytes to read; `http.client` asks for no other one."""
        return io.BufferedReader(_Reader(self._sock, self._deadline))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Connection(HTTPConnection):
    """A connection to http until the deadline; `connect` puts the deadline around its socket."""

    def __init__(self, host: str, *, deadline: Deadline, **settings: Any) -> None:
        super().__init__(host, **settings | {"timeout": deadline.left()})
        self.deadline = deadline

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _Socket(self.sock, self.deadline)


class _SecureConnection(_Connection, HTTPSConnection):
    """A connection to https, which connects as `HTTPSConnection` does."""


class TimedHTTPHandler(HTTPHandler):
    """urllib's handler; `http_open` connects with a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_Connection, deadline=self.deadline), req)


class TimedHTTPSHandler(HTTPSHandler):
    """urllib's handler; `https_open` connects with a deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_SecureConnection, deadline=self.deadline), req)
