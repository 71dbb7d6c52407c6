"""Engines that somebody has started, perhaps on another terminal: they join at an address, with keys from a file.

The file has the router's keys, those of its engines, and the secret that both sides know; whoever can read it can be
either, so it is made readable for its owner alone. An engine that ends and is started again joins again.
"""

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1_single_request.errors import ConfigError
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Call, Failed, Probe, Refused, ToEngine, ToRouter
from m6_multimodal_pd.disaggregation.runtime.sockets import RouterSocket
from m6_multimodal_pd.disaggregation.runtime.wire import Codec
from m6_multimodal_pd.errors import PeerLostError

PROBE_EVERY_S = 1.0


@dataclass(frozen=True)
class Keys:
    """What both sides of a group must know."""

    secret: bytes
    router: CurveKeys
    engines: CurveKeys


def write_keys(path: str | Path) -> None:
    """Make new keys. Raises `ConfigError` if there is such a file, or it cannot be written."""
    router, engines = CurveKeys.generate()
    text = json.dumps({"secret": secrets.token_hex(32), "router": _plain(router), "engines": _plain(engines)})
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def read_keys(path: str | Path) -> Keys:
    """What `write_keys` has written. Raises `ConfigError` for anything else, and for a file that others can read."""
    try:
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others: chmod 600 it, or make new keys")
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return Keys(bytes.fromhex(values["secret"]), _made(values["router"]), _made(values["engines"]))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of keys: python -m m6_multimodal_pd.pd keys FILE makes one") from error


def _plain(keys: CurveKeys) -> dict[str, Any]:
    return {"public": keys.public, "secret": keys.secret, "trusted": sorted(keys.trusted)}


def _made(values: Any) -> CurveKeys:
    return CurveKeys(public=values["public"], secret=values["secret"], trusted=frozenset(values["trusted"]))


class HandLinks:
    """The `Links` to engines that others have started."""

    def __init__(self, config: DisaggregationConfig) -> None:
        """Raises `ConfigError` for an address or keys that cannot be used."""
        assert config.address is not None and config.key_file is not None
        keys = read_keys(config.key_file)
        self.socket: RouterSocket[Any] = RouterSocket(
            config.address,
            codec=Codec(ToRouter, config.max_message_bytes),
            secret=keys.secret,
            keys=keys.router,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self._lost: deque[Lost] = deque()
        self._next_probe = 0.0

    def drop(self, name: str, why: str) -> None:
        """Believe it no more: whoever has that name next is another engine."""
        self.socket.forget(name)

    def refuse(self, name: str, why: str) -> None:
        """It ends with these words."""
        with suppress(PeerLostError):
            self.socket.send(name, Refused(why[:LONGEST_TEXT]))
        self.socket.forget(name)

    def coming(self, role: str) -> bool:
        """Nobody knows."""
        return False

    def send(self, name: str, message: ToEngine) -> None:
        """Queue a message."""
        self.socket.send(name, message)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """What has come."""
        for name, message in self.socket.arrivals(timeout_s):
            if isinstance(message, Failed):
                self.socket.forget(name)
            else:
                yield name, message

    def lost(self) -> Iterator[Lost]:
        """Who cannot be reached any more: that shows when something is sent. Those that have not joined yet are probed,
        too: an engine that dies while it loads keeps its name from the one that is started in its place."""
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + PROBE_EVERY_S
            for name in self.socket.names:
                try:
                    self.socket.send(name, Probe())
                except PeerLostError as error:
                    self._lost.append(Lost(name, str(error)))
        return handed_out(self._lost)

    def close(self) -> None:
        """Tell all engines that it is over, and leave."""
        for name in self.socket.names:
            with suppress(PeerLostError):
                self.socket.send(name, Call(0, "shutdown"))
        self.socket.close()
