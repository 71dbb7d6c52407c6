"""A ZeroMQ socket with limits: for the time of a call, for messages in both directions, and for its end.

New in this milestone; the common part of `RouterSocket` and `EngineSocket`. ZeroMQ's defaults allow messages of any
size, and wait at the end for the last ones without a limit. vLLM: `make_zmq_socket` in `utils/network_utils.py`;
SGLang: `get_zmq_socket` in `utils/common.py`.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import Generic, TypeVar

import zmq

from m1_single_request.errors import ConfigError, shown
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.runtime.door import HANDSHAKE_TIMEOUT_S
from m6_multimodal_pd.dropped import when_dropped
from m6_multimodal_pd.wire import Codec, Frame

M = TypeVar("M")

LINGER_MS = 500
MAX_QUEUED = 100_000
"""Messages that may wait for each peer, in each direction. Thousands are sent at once if an engine is lost and all its
requests are cancelled; they are at most as many as the requests of the group."""
MAX_PER_CALL = 256
"""Maximum number of messages that one call receives."""
PING_EVERY_S = 1.0
LONGEST_TIMER_MS = 2**31 - 1
FRAME_OVERHEAD = 256
"""Bytes that encryption adds to a frame."""


class Endpoint(Generic[M]):
    """One socket with a context of its own, for one thread (a user's calls are checked by `LLMEngine`).

    A connection whose other side is silent for `heartbeat_timeout_s` is closed."""

    def __init__(self, kind: int, *, codec: Codec[M], keys: CurveKeys, heartbeat_timeout_s: float) -> None:
        self._codec = codec
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        # not at exit: a daemon thread may still be inside ZeroMQ, and the sockets end with the process
        when_dropped(self, _release, self._context, self._socket, 0).atexit = False
        self._set(
            {
                zmq.LINGER: LINGER_MS,
                zmq.MAXMSGSIZE: codec.max_bytes + FRAME_OVERHEAD,  # ZeroMQ cuts off a peer that begins a larger frame
                zmq.SNDHWM: MAX_QUEUED,
                zmq.RCVHWM: MAX_QUEUED,
                zmq.HANDSHAKE_IVL: ceil(HANDSHAKE_TIMEOUT_S * 1000),
                zmq.CURVE_PUBLICKEY: keys.public.encode(),
                zmq.CURVE_SECRETKEY: keys.secret.encode(),
                **heartbeats(heartbeat_timeout_s),
            }
        )

    def close(self) -> None:
        """Close the socket, end ZeroMQ's thread. Queued messages have LINGER_MS to leave. May be called twice."""
        _release(self._context, self._socket, LINGER_MS)

    def _set(self, options: dict[int, int | bytes]) -> None:
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def _open(self, open_at: Callable[[str], object], address: str) -> str:
        """Bind or connect; return the address with the port that the system chose for `*`. Close if that fails."""
        self._set({zmq.IPV6: int("[" in address)})
        try:
            open_at(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"address={shown(address)} cannot be used: {error}") from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _read(self, timeout_s: float) -> list[list[zmq.Frame]]:
        """Return the messages that have arrived, at most `MAX_PER_CALL`, each as its frames; wait for the first one."""
        self._socket.poll(ceil(max(timeout_s, 0.0) * 1000))
        found: list[list[zmq.Frame]] = []
        with suppress(zmq.Again):
            while len(found) < MAX_PER_CALL:
                found.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        return found

    def _write(self, frames: Sequence[Frame]) -> None:
        """Queue a message. Raises `zmq.Again` if as many as `MAX_QUEUED` wait."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)


def heartbeats(timeout_s: float) -> dict[int, int]:
    """Return options for pings, which ZeroMQ's thread sends and answers, also while the program computes."""
    interval_s = min(PING_EVERY_S, timeout_s / 4)
    seconds = {
        zmq.HEARTBEAT_IVL: interval_s,
        zmq.HEARTBEAT_TIMEOUT: timeout_s - interval_s,  # counted from a ping
        zmq.TCP_MAXRT: timeout_s,  # a ping does not overtake a large message that the other side does not read
    }
    return {option: ceil(min(value * 1000, LONGEST_TIMER_MS)) for option, value in seconds.items()}


def _release(context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", linger_ms: int) -> None:
    """Close the one socket that this thread has of the context, and end the context."""
    socket.close(linger_ms)
    if getattr(threading.current_thread(), "context", None) is not context:  # the doorkeeper's sockets are open yet
        context.term()
