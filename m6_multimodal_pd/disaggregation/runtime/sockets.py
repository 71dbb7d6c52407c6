"""One socket for a group of engines: the router binds it, and engines connect and never wait for each other.

New in this milestone. The router binds a ROUTER socket, each engine connects a DEALER socket, and messages between two
engines go through the router, so that one door is guarded. The keys of a connection (`credentials.py`) prove that its
other side belongs to the group. An engine's identity is its name and a random part, so that an engine that is started
again under its name is another peer. A connection that broke stays broken; an engine that comes back is a new one.

    engine                                             router
      | [b"HELLO"]           as name.random  ---------->  |   the name is taken from now on
      | <----------  [b"WELCOME"]                         |   the engine has joined
      | [head, array, ...] <--------------->  [head, array, ...]

No call blocks but `receive`, for `timeout_s`, and `close`, for LINGER_MS. vLLM: `MPClient` in
`v1/engine/core_client.py`, a ROUTER in front of engines that register with a first message; SGLang: PUSH and PULL pairs
in `managers/scheduler.py`.
"""

import errno
import logging
import os
import re
import secrets
import socket
import weakref
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import zmq

from m1_single_request.errors import ConfigError, shown
from m6_multimodal_pd.disaggregation.runtime.credentials import NAME, CurveKeys, check_address
from m6_multimodal_pd.disaggregation.runtime.door import Doorkeeper
from m6_multimodal_pd.disaggregation.runtime.endpoint import Endpoint, M
from m6_multimodal_pd.dropped import when_dropped
from m6_multimodal_pd.errors import PeerLostError, WireError
from m6_multimodal_pd.wire import Codec

LOOPBACK = "tcp://127.0.0.1:*"
HELLO = b"HELLO"
WELCOME = b"WELCOME"
IDENTITY = re.compile(rb"(%s)\.[0-9a-f]{32}" % NAME.pattern.encode())

LOG = logging.getLogger(__name__)


class RouterSocket(Endpoint[M]):
    """The router's side. `address` is the real one, with the port that the system chose for `*`.

    Raises `ConfigError` if the address cannot be used.
    """

    def __init__(self, address: str, *, codec: Codec[M], keys: CurveKeys, heartbeat_timeout_s: float) -> None:
        check_address(address)
        path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if path is not None and os.path.lexists(path):  # ZeroMQ would remove the file
            raise ConfigError(f"address={shown(address)} exists already; remove it if no process uses it")
        super().__init__(zmq.ROUTER, codec=codec, keys=keys, heartbeat_timeout_s=heartbeat_timeout_s)
        self._names: dict[bytes, str] = {}
        self._identities: dict[str, bytes] = {}
        self._set({zmq.CURVE_SERVER: 1, zmq.ZAP_DOMAIN: b"stepwise"})
        self._set({zmq.ROUTER_MANDATORY: 1})  # report that a peer is gone, instead of dropping messages for it
        self._set({zmq.ROUTER_HANDOVER: 0})  # an identity stays with its connection
        self._unlink: weakref.finalize[Any, Any] | None = None
        self._woken, self._waker = ends = socket.socketpair()
        for end in ends:
            when_dropped(self, end.close)
        self._door = Doorkeeper(self._context, self._socket, keys.trusted)
        self.address = self._open(self._socket.bind, address)
        self._unlink = when_dropped(self, path.unlink, True) if path is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """The engines that have sent a hello and are not forgotten, in the order in which they came."""
        return tuple(self._identities)

    def receive(self, timeout_s: float = 0.0) -> list[tuple[str, M]]:
        """Return the messages that have arrived, with the names of their engines; wait for the first one, at most
        `timeout_s` seconds. A rejected message ends the wait, too."""
        received = []
        zmq.zmq_poll([(self._socket, zmq.POLLIN), (self._woken.fileno(), zmq.POLLIN)], ceil(timeout_s * 1000))
        with suppress(BlockingIOError):
            self._woken.recv(4096, socket.MSG_DONTWAIT)
        for identity, *frames in self._read(0.0):
            try:
                name = self._names.get(identity.bytes)
                if name is None:
                    self._admit(identity, frames)
                else:
                    received.append((name, self._codec.decode([frame.buffer for frame in frames])))
            except WireError as error:
                LOG.info("refused: from %s: %s", shown(identity.bytes), error)
        return received

    def send(self, name: str, message: M) -> None:
        """Queue `message` for an engine.

        Raises `WireError` if the message is too large, `PeerLostError` if the engine is gone (it is then forgotten),
        was never there, or has as many messages waiting as may wait.
        """
        frames = self._codec.encode(message)
        identity = self._identities.get(name)
        if identity is None:
            raise PeerLostError(f"there is no engine {shown(name)}; there are {shown(self.names)}")
        try:
            self._write([identity, *frames])
        except zmq.Again:
            raise PeerLostError(f"engine {name!r} does not read its messages") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.forget(name)
            raise PeerLostError(f"engine {name!r} is gone") from None

    def wake(self) -> None:
        """End the wait of `receive`, called by another thread."""
        with suppress(BlockingIOError, OSError):  # it is awake; the socket is closed
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    def forget(self, name: str) -> None:
        """Accept no more messages of an engine, if there is such a one. Its name is free for another."""
        self._names.pop(self._identities.pop(name, b""), None)

    def close(self) -> None:
        """Close as every endpoint; remove the file of an `ipc` address, which ZeroMQ leaves if it has not named it."""
        super().close()
        self._woken.close()
        self._waker.close()
        self._door.join()
        if self._unlink is not None:
            self._unlink()

    def _admit(self, sender: zmq.Frame, frames: list[zmq.Frame]) -> None:
        """Admit the engine that sent these frames. Raises `WireError` if they are no hello."""
        identity = sender.bytes
        found = IDENTITY.fullmatch(identity)
        if found is None or [frame.bytes for frame in frames] != [HELLO]:
            raise WireError("a message of a peer that has not sent a hello")
        name = found[1].decode()
        if name in self._identities:
            raise WireError(f"there is another engine {name!r}")
        self._door.admit(sender.get(zmq.SRCFD))
        with suppress(zmq.ZMQError):  # gone already: the first `send` reports it
            self._write([identity, WELCOME])
        self._identities[name] = identity
        self._names[identity] = name


class EngineSocket(Endpoint[M]):
    """An engine's side. It connects once; `joined` is True when the router has answered.

    A router that is not there yet, or has another engine of the name, answers nothing; the caller decides how long to
    wait. Raises `ConfigError` for a name or an address that cannot be used.
    """

    def __init__(
        self, address: str, *, name: str, codec: Codec[M], keys: CurveKeys, heartbeat_timeout_s: float
    ) -> None:
        check_address(address)
        if not NAME.fullmatch(name):
            raise ConfigError(f"name={shown(name)} must be 1 to 64 letters, digits, - or _")
        super().__init__(zmq.DEALER, codec=codec, keys=keys, heartbeat_timeout_s=heartbeat_timeout_s)
        self.name, self.joined = name, False
        self._set({zmq.ROUTING_ID: f"{name}.{secrets.token_hex(16)}".encode()})
        self._set({zmq.CURVE_SERVERKEY: keys.trusted.encode()})
        self._set({zmq.RECONNECT_IVL: -1})  # never
        self._open(self._socket.connect, address)
        with suppress(zmq.Again):  # refused already: `was_cut` says so
            self._write([HELLO])

    def was_cut(self) -> bool:
        """Return whether the connection to the router is over, or the router does not read its messages."""
        return not self._socket.poll(0, zmq.POLLOUT)

    def receive(self, timeout_s: float = 0.0) -> list[M]:
        """Return the messages that have arrived; wait for the first one, as `RouterSocket.receive` does."""
        received = []
        for frames in self._read(timeout_s):
            try:
                if self.joined:
                    received.append(self._codec.decode([frame.buffer for frame in frames]))
                elif [frame.bytes for frame in frames] == [WELCOME]:
                    self.joined = True
                else:
                    raise WireError("a message before the welcome")
            except WireError as error:
                LOG.info("refused: from the router: %s", error)
        return received

    def send(self, message: M) -> None:
        """Queue `message` for the router.

        Raises `WireError` if the message is too large, `PeerLostError` if the router is gone or does not read.
        """
        frames = self._codec.encode(message)
        try:
            self._write(frames)
        except zmq.Again:
            raise PeerLostError("the router is gone, or does not read its messages") from None
