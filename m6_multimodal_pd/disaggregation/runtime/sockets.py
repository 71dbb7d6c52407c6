"""One socket in the middle: a router that binds, engines that connect, and nothing between them that can be waited for.

New in this milestone. The router binds a ROUTER socket, each engine connects a DEALER socket, and what an engine has to
say to another goes through the router, so that there is one door to guard. An engine's identity is its name and a
random part that only the router ever sees: to know it is to be that engine, nobody can take it, and nobody can occupy
it beforehand. The first message of each side is a proof that it knows the shared secret. A connection that broke stays
broken, because whoever answers at the address next may be someone else; an engine that comes back is a new one.

    engine                                             router
      | [b"HELLO", proof]    as name.random  ---------->  |   the name is taken from now on
      | <----------  [b"WELCOME", proof]                  |   from now on the engine believes what comes
      | [head, array, ...] <--------------->  [head, array, ...]

Nothing here blocks but `wait` and, for LINGER_MS at most, `close`. vLLM: `MPClient` in `v1/engine/core_client.py`, a
ROUTER in front of engines that register with a first message; SGLang: PUSH and PULL pairs in `managers/scheduler.py`.
"""

import errno
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

import zmq

from m1_single_request.errors import ConfigError, shown
from m6_multimodal_pd.disaggregation.config import HEARTBEAT_TIMEOUT_S
from m6_multimodal_pd.disaggregation.runtime.credentials import (
    ENGINE,
    NAME,
    ROUTER,
    CurveKeys,
    check_address,
    check_secret,
    is_proof,
    proof,
)
from m6_multimodal_pd.disaggregation.runtime.endpoint import (
    LOOPBACK,
    MAX_PER_CALL,
    MAX_QUEUED,
    Endpoint,
    Refusals,
    Woken,
)
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.wire import Codec, Frame
from m6_multimodal_pd.errors import PeerLostError, WireError

M = TypeVar("M")

HELLO = b"HELLO"
WELCOME = b"WELCOME"
IDENTITY = re.compile(rb"(%s)\.[0-9a-f]{32}" % NAME.pattern.encode())


class RouterSocket(Generic[M]):
    """The router's side. `address` is where it really is, with the port that the system chose for `*`.

    Belongs to the thread that built it. `on_refused` hears, at most once a second, why something was not let in;
    `num_refused` counts it all. Raises ConfigError if the address cannot be used, or needs keys.
    """

    def __init__(
        self,
        address: str = LOOPBACK,
        *,
        codec: Codec[M],
        secret: bytes,
        keys: CurveKeys | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
        max_queued: int = MAX_QUEUED,
        max_per_call: int = MAX_PER_CALL,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        check_address(address, keys)
        check_secret(secret)
        self._codec = codec
        self._secret = secret
        self._max_per_call = max_per_call
        self._refusals = Refusals(on_refused)
        self._arrived: deque[list[Frame]] = deque()
        self._names: dict[bytes, str] = {}
        self._identities: dict[str, bytes] = {}
        self._endpoint = Endpoint(
            zmq.ROUTER, max_bytes=codec.max_bytes, max_queued=max_queued, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._endpoint.set(zmq.ROUTER_MANDATORY, 1)  # tell when a peer is gone, instead of dropping what is for it
        self._endpoint.set(zmq.ROUTER_HANDOVER, 0)  # who has an identity keeps it
        self.address = self._endpoint.bind(address, keys)

    @property
    def names(self) -> tuple[str, ...]:
        """The engines that have said hello and are not forgotten, in the order in which they came."""
        return tuple(self._identities)

    @property
    def num_refused(self) -> int:
        """Peers and messages that were not let in."""
        return self._refusals.total

    def wait(self, timeout_s: float, watched: int | None = None) -> Woken:
        """Sleep until something arrives, the file descriptor `watched` can be read, or the time is over."""
        return self._endpoint.wait(timeout_s, watched)

    def receive(self, timeout_s: float = 0.0) -> list[tuple[str, M]]:
        """What has arrived, in the order of each engine, with its name; waits for the first of it.

        May be empty before the time is over: also what is refused wakes it, and counts to the most that one call reads.
        """
        return list(self.arrivals(timeout_s))

    def arrivals(self, timeout_s: float) -> Iterator[tuple[str, M]]:
        """The same, one after the other: each is kept until the next one is asked for (`inbox.py`)."""
        self._endpoint.wait(0.0 if self._arrived else timeout_s)
        for reason in self._endpoint.answer_door(self._max_per_call):
            self._refusals.add(reason)
        self._arrived.extend(self._endpoint.read(self._max_per_call))
        for identity, *frames in handed_out(self._arrived):
            try:
                name = self._names.get(bytes(identity))
                if name is None:
                    self._admit(bytes(identity), frames)
                else:
                    yield name, self._codec.decode(frames)
            except WireError as error:
                self._refusals.add(f"from {shown(bytes(identity))}: {error}")

    def send(self, name: str, message: M) -> None:
        """Queue `message` for an engine.

        Raises WireError if the message is too large, PeerLostError if the engine is gone (it is then forgotten), was
        never there, or has as many messages waiting as may wait.
        """
        frames = self._codec.encode(message)
        identity = self._identities.get(name)
        if identity is None:
            raise PeerLostError(f"there is no engine {shown(name)}; there are {shown(self.names)}")
        try:
            self._endpoint.write([identity, *frames])
        except zmq.Again:
            raise PeerLostError(f"engine {name!r} does not read its messages") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.forget(name)
            raise PeerLostError(f"engine {name!r} is gone") from None

    def forget(self, name: str) -> None:
        """Believe an engine no more, if there is such a one. Its name is free for another."""
        self._endpoint.check_usable()
        identity = self._identities.pop(name, None)
        if identity is not None:
            del self._names[identity]

    def close(self) -> None:
        """Give back the address; what is still queued has LINGER_MS to leave. May be called twice."""
        self._endpoint.close()

    def _admit(self, identity: bytes, frames: list[Frame]) -> None:
        """Take in the engine behind `identity` if these frames are its hello. Raises WireError if not."""
        found = IDENTITY.fullmatch(identity)
        if found is None or len(frames) != 2 or bytes(frames[0]) != HELLO:
            raise WireError("a message of one that has not said hello")
        if not is_proof(bytes(frames[1]), self._secret, ENGINE, identity):
            raise WireError("a hello with a wrong secret")
        name = found[1].decode()
        if self._identities.get(name, identity) != identity:  # its own if it is admitted again, after a Ctrl-C
            raise WireError(f"there is another engine {name!r}")
        with suppress(zmq.ZMQError):  # gone already: the first `send` will say so
            self._endpoint.write([identity, WELCOME, proof(self._secret, ROUTER, identity)])
        self._identities[name] = identity
        self._names[identity] = name


class EngineSocket(Generic[M]):
    """An engine's side. It connects once: `joined` says whether the router has answered.

    A router that is not there yet, does not know the secret, or has another engine of the name, answers nothing; how
    long to wait for it is for the caller to say. Belongs to the thread that built it. Raises ConfigError.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        codec: Codec[M],
        secret: bytes,
        keys: CurveKeys | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
        max_queued: int = MAX_QUEUED,
        max_per_call: int = MAX_PER_CALL,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        check_address(address, keys)
        check_secret(secret)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"name={shown(name)} must be 1 to 64 letters, digits, - or _")
        self.name = name
        self.joined = False
        self._codec = codec
        self._secret = secret
        self._max_per_call = max_per_call
        self._refusals = Refusals(on_refused)
        self._identity = f"{name}.{secrets.token_hex(16)}".encode()
        self._endpoint = Endpoint(
            zmq.DEALER, max_bytes=codec.max_bytes, max_queued=max_queued, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._endpoint.set(zmq.ROUTING_ID, self._identity)
        self._endpoint.set(zmq.RECONNECT_IVL, -1)  # never
        self._endpoint.connect(address, keys)
        self._endpoint.write([HELLO, proof(secret, ENGINE, self._identity)])

    def was_cut(self) -> bool:
        """Whether the router is gone, or cannot be reached any more."""
        return self._endpoint.was_cut()

    @property
    def num_refused(self) -> int:
        """Messages that were not believed or could not be read."""
        return self._refusals.total

    def wait(self, timeout_s: float, watched: int | None = None) -> Woken:
        """Sleep until something arrives, the file descriptor `watched` can be read, or the time is over."""
        return self._endpoint.wait(timeout_s, watched)

    def receive(self, timeout_s: float = 0.0) -> list[M]:
        """What has arrived; waits for the first of it. May be empty before the time is over, see `RouterSocket`."""
        self._endpoint.wait(timeout_s)
        received = []
        for frames in self._endpoint.read(self._max_per_call):
            try:
                if self.joined:
                    received.append(self._codec.decode(frames))
                else:
                    self._join(frames)
            except WireError as error:
                self._refusals.add(f"from the router: {error}")
        return received

    def send(self, message: M) -> None:
        """Queue `message` for the router.

        Raises WireError if the message is too large, PeerLostError if the router is gone or does not read.
        """
        frames = self._codec.encode(message)
        try:
            self._endpoint.write(frames)
        except zmq.Again:
            raise PeerLostError("the router is gone, or does not read its messages") from None

    def close(self) -> None:
        """Leave; what is still queued has LINGER_MS to do so. May be called twice."""
        self._endpoint.close()

    def _join(self, frames: list[Frame]) -> None:
        """Believe the router from now on if these frames are its welcome. Raises WireError if not."""
        if len(frames) != 2 or bytes(frames[0]) != WELCOME:
            raise WireError("a message of one that has not said welcome")
        if not is_proof(bytes(frames[1]), self._secret, ROUTER, self._identity):
            raise WireError("a welcome with a wrong secret")
        self.joined = True
