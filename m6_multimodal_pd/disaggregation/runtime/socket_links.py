"""Engines in other processes, reached through one socket. How they start and end is for the subclasses."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from m1_single_request.errors import EngineClosedError
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys, read_keys
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Call, Failed, Probe, Refused, ToEngine, ToRouter
from m6_multimodal_pd.disaggregation.runtime.sockets import RouterSocket
from m6_multimodal_pd.disaggregation.runtime.wire import Codec
from m6_multimodal_pd.errors import PeerLostError

PROBE_EVERY_S = 1.0


class SocketLinks:
    """Common part of the `Links` to engines in other processes."""

    def __init__(self, address: str, keys: CurveKeys, config: DisaggregationConfig) -> None:
        """Raises `ConfigError` for an address that cannot be used."""
        self.socket: RouterSocket[Any] = RouterSocket(
            address,
            codec=Codec(ToRouter, config.max_message_bytes),
            keys=keys,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self._lost: deque[Lost] = deque()
        self._next_probe = 0.0

    def send(self, name: str, message: ToEngine) -> None:
        self.socket.send(name, message)

    def _probe(self, names: Iterable[str]) -> None:
        """Note the engines among these that cannot be reached any more, once a second."""
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + PROBE_EVERY_S
            for name in names:
                try:
                    self.socket.send(name, Probe())
                except PeerLostError as error:
                    self._lost.append(Lost(name, str(error)))

    def shut_down(self) -> None:
        """Ask all engines to end. Does nothing after `close`, which an interrupt may have ended too early."""
        for name in self.socket.names:
            with suppress(PeerLostError, EngineClosedError):
                self.socket.send(name, Call(0, "shutdown"))


class HandLinks(SocketLinks):
    """The `Links` to engines that a user starts, perhaps on another terminal; they join at an address, with keys from
    a file. An engine that ends and is started again joins again."""

    def __init__(self, config: DisaggregationConfig) -> None:
        """Raises `ConfigError` for an address or keys that cannot be used."""
        assert config.address is not None and config.key_file is not None
        super().__init__(config.address, read_keys(config.key_file).router, config)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """Yield messages; forget an engine that cannot be built, so that its name is free."""
        for name, message in self.socket.receive(timeout_s):
            if isinstance(message, Failed):
                self.socket.forget(name)
            else:
                yield name, message

    def lost(self) -> Iterator[Lost]:
        """Yield engines that cannot be reached, also those that have not joined: an engine that dies while it loads
        would keep its name from the one that is started in its place."""
        self._probe(self.socket.names)
        return handed_out(self._lost)

    def drop(self, name: str, why: str) -> None:
        self.socket.forget(name)

    def refuse(self, name: str, why: str) -> None:
        """Send the reason to an engine, which ends with it, and forget the engine."""
        with suppress(PeerLostError):
            self.socket.send(name, Refused(why[:LONGEST_TEXT]))
        self.socket.forget(name)

    def coming(self, role: str) -> bool:
        """Return False: the router does not start engines."""
        return False

    def close(self) -> None:
        self.shut_down()
        self.socket.close()
