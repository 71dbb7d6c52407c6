"""Links to engines in other processes, through one socket.

An engine that a user starts, perhaps in another terminal, joins at an address, with keys from a file; one that ends and
is started again joins again. `processes.py` adds the engines that the router starts itself.
"""

import time
from contextlib import suppress
from typing import Any

import zmq

from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Call, Probe, Refused, ToEngine, ToRouter
from m6_multimodal_pd.disaggregation.runtime.sockets import RouterSocket
from m6_multimodal_pd.errors import PeerLostError
from m6_multimodal_pd.wire import Codec

PROBE_EVERY_S = 1.0


class SocketLinks:
    """The `Links` to engines that users start."""

    def __init__(self, address: str, keys: CurveKeys, group: DisaggregationConfig) -> None:
        """Bind the socket. Raises `ConfigError` for an address that cannot be used."""
        codec: Codec[Any] = Codec(ToRouter, group.max_message_bytes)
        self.socket = RouterSocket(address, codec=codec, keys=keys, heartbeat_timeout_s=group.heartbeat_timeout_s)
        self._next_probe = 0.0

    def send(self, name: str, message: ToEngine) -> None:
        self.socket.send(name, message)

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        return self.socket.receive(timeout_s)

    def wake(self) -> None:
        self.socket.wake()

    def lost(self) -> list[Lost]:
        """Send a probe to each engine, once a second; return those that cannot be reached.

        These include engines that have not joined: one that ends while it loads would keep its name.
        """
        now, unreachable = time.monotonic(), []
        if now >= self._next_probe:
            self._next_probe = now + PROBE_EVERY_S
            for name in self.socket.names:
                try:
                    self.socket.send(name, Probe())
                except PeerLostError as error:
                    unreachable.append(Lost(name, str(error)))
        return unreachable

    def drop(self, name: str, why: str) -> None:
        self.socket.forget(name)

    def refuse(self, name: str, why: str) -> None:
        """Send the reason to an engine, which ends with it, and forget the engine."""
        with suppress(PeerLostError):
            self.socket.send(name, Refused(why[:LONGEST_TEXT]))
        self.socket.forget(name)

    def coming(self, role: str) -> bool:
        """Return False: users start the engines."""
        return False

    def close(self) -> None:
        """Ask all engines to end, and close the socket. May be called twice."""
        for name in self.socket.names:
            with suppress(PeerLostError, zmq.ZMQError):  # it is gone; this socket is closed
                self.socket.send(name, Call(0, "shutdown"))
        self.socket.close()
