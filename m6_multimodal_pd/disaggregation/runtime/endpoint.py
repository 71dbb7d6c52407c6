"""A ZeroMQ socket that never blocks by accident, has limits in every direction, and leaves nothing when it is closed.

New in this milestone; what `RouterSocket` and `EngineSocket` have in common. ZeroMQ's own defaults are made for
friends: messages of any size, an endless wait for the last ones at the end, and no word about who was turned away.
vLLM: `make_zmq_socket` in `utils/network_utils.py`; SGLang: `get_zmq_socket` in `utils/common.py`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from m1_single_request.config import check_whole_number
from m1_single_request.errors import ConfigError, EngineClosedError, EngineUsageError, shown
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys, Doorkeeper
from m6_multimodal_pd.disaggregation.runtime.dropped import when_dropped
from m6_multimodal_pd.disaggregation.runtime.wire import Frame

LOOPBACK = "tcp://127.0.0.1:*"
LINGER_MS = 500
MAX_QUEUED = 100_000
"""Messages that may wait while the other side does something else. Thousands come at once, say if an engine is lost and
all of its requests are taken back; they are no more than the requests that were taken in."""
MAX_PER_CALL = 256
REPORT_EVERY_S = 1.0
PING_EVERY_S = 1.0
LONGEST_TIMER_MS = 2**31 - 1
FRAME_OVERHEAD = 256
"""Bytes that a frame may have beyond those of a message: of a proof, and of encryption."""

BUFFER: Callable[[zmq.Frame], memoryview] = attrgetter("buffer")


class Woken(NamedTuple):
    """Why a wait ended. Both are False when its time was over."""

    arrived: bool
    """There is something to receive."""
    watched: bool
    """The watched file descriptor can be read, or was closed at its other end."""


class Refusals:
    """Counts what was not let in, and reports it at most once a second: a flood of messages is no flood of lines."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._report = report
        self._clock = clock
        self._unreported = 0
        self._next_report = float("-inf")

    def add(self, reason: str) -> None:
        """Something was refused, and why."""
        self.total += 1
        now = self._clock()
        if now < self._next_report:
            self._unreported += 1
            return
        others, self._unreported = self._unreported, 0
        self._next_report = now + REPORT_EVERY_S
        self._report(f"{reason} ({others} others before it)" if others else reason)


class Endpoint:
    """One socket with a context of its own, for one thread. `max_queued` messages may wait for each peer, each way.

    A connection whose other side is silent for `heartbeat_timeout_s` is closed."""

    def __init__(self, kind: int, *, max_bytes: int, max_queued: int, heartbeat_timeout_s: float) -> None:
        check_whole_number("max_queued", max_queued, low=1)
        self._thread = threading.get_ident()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._sockets: list[Any] = [self._socket]
        # not at exit: a daemon thread may still be inside ZeroMQ, and the sockets end with the process
        when_dropped(self, _destroy, self._context, self._sockets).atexit = False
        self._door: Doorkeeper | None = None
        self._monitor: Any = None
        self._unlink: Callable[[], object] = lambda: None
        self.set(zmq.LINGER, LINGER_MS)
        self.set(zmq.MAXMSGSIZE, max_bytes + FRAME_OVERHEAD)  # ZeroMQ cuts off a peer that begins a larger frame
        self.set(zmq.SNDHWM, max_queued)
        self.set(zmq.RCVHWM, max_queued)
        self._set_heartbeats(heartbeat_timeout_s)

    def set(self, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._socket.setsockopt(option, value)

    def bind(self, address: str, keys: CurveKeys | None) -> str:
        """Be where others connect, with `keys` only for those whose keys are trusted. The address as it turned out."""
        try:
            path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
            if path is not None and os.path.lexists(path):  # ZeroMQ would remove it, whosever it is
                raise ConfigError(f"address={shown(address)} exists already; remove it if nobody is using it")
            if keys is not None:
                self._door = Doorkeeper(self._context, keys.trusted)
                self._sockets.append(self._door.socket)
                self._set_keys(keys)
                self.set(zmq.CURVE_SERVER, 1)
                self.set(zmq.ZAP_DOMAIN, b"stepwise")
            actual = self._open(self._socket.bind, address)
            if path is not None:  # ZeroMQ removes only what it has named itself
                self._unlink = when_dropped(self, path.unlink, True)
            return actual
        except BaseException:
            self.close()
            raise

    def connect(self, address: str, keys: CurveKeys | None) -> None:
        """Be a peer of who is there, with `keys` only if it has the one trusted key."""
        try:
            if keys is not None:
                if len(keys.trusted) != 1:
                    raise ConfigError(f"an engine trusts the key of one router, not {len(keys.trusted)} keys")
                self._set_keys(keys)
                self.set(zmq.CURVE_SERVERKEY, next(iter(keys.trusted)).encode())
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._sockets.append(self._monitor)
            self._open(self._socket.connect, address)
        except BaseException:
            self.close()
            raise

    def was_cut(self) -> bool:
        """Whether the connection that `connect` has made is over."""
        self.check_usable()
        return self._monitor is not None and bool(self._monitor.poll(0))

    def wait(self, timeout_s: float, watched: int | None = None) -> Woken:
        """Sleep until something arrives, the file descriptor `watched` can be read, or the time is over."""
        self.check_usable()
        own = [self._socket] if self._door is None else [self._socket, self._door.socket]
        sources: list[Any] = own if watched is None else [*own, watched]
        ready = zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], ceil(max(timeout_s, 0.0) * 1000))
        woken = [source for source, _ in ready]
        return Woken(any(source is not watched for source in woken), watched in woken)

    def read(self, at_most: int) -> Iterator[list[Frame]]:
        """Messages that are there, each as its frames."""
        self.check_usable()
        for _ in range(at_most):
            try:
                yield list(map(BUFFER, self._socket.recv_multipart(zmq.NOBLOCK, copy=False)))
            except zmq.Again:
                return

    def answer_door(self, at_most: int) -> Iterator[str]:
        """Answer peers that wait to be let in; why not, for those that are not."""
        if self._door is None:
            return
        for _ in range(at_most):
            try:
                refused = self._door.answer()
            except zmq.Again:
                return
            if refused is not None:
                yield refused

    def write(self, frames: list[bytes]) -> None:
        """Queue a message. Raises zmq.Again where there is no room for it."""
        self.check_usable()
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket, end ZeroMQ's thread, remove the file of an `ipc` address. May be called twice."""
        self._check_thread()
        if self._door is not None:
            self._door.socket.close()
        if self._monitor is not None and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()
        self._context.term()
        self._unlink()

    def check_usable(self) -> None:
        """Raise EngineUsageError in another thread, EngineClosedError after `close`."""
        self._check_thread()
        if self._socket.closed:
            raise EngineClosedError("this socket is closed")

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise EngineUsageError("a socket belongs to the thread that built it; this call came from another thread")

    def _set_heartbeats(self, timeout_s: float) -> None:
        """ZeroMQ's thread asks the other side for a sign of life, and answers, whatever the two programs do."""
        interval_s = min(PING_EVERY_S, timeout_s / 4)
        for option, seconds in (
            (zmq.HEARTBEAT_IVL, interval_s),
            (zmq.HEARTBEAT_TIMEOUT, timeout_s - interval_s),  # counted from a ping
            (zmq.TCP_MAXRT, timeout_s),  # no ping leaves behind a large message that the other side does not read
        ):
            self.set(option, ceil(min(seconds * 1000, LONGEST_TIMER_MS)))

    def _set_keys(self, keys: CurveKeys) -> None:
        self.set(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self.set(zmq.CURVE_SECRETKEY, keys.secret.encode())

    def _open(self, open_at: Callable[[str], object], address: str) -> str:
        self.set(zmq.IPV6, int("[" in address))
        try:
            open_at(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"address={shown(address)} cannot be used: {error}") from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _destroy(context: "zmq.Context[zmq.Socket[bytes]]", sockets: list[Any]) -> None:
    """Close these sockets, which are all of the context, without waiting for what is still queued."""
    context.destroy(linger=0)
