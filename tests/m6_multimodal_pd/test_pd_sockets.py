"""Strangers at the door get nothing through and stop nobody; engines that belong are served all the while."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from m1_single_request.errors import ConfigError
from m6_multimodal_pd.disaggregation.runtime import door, endpoint
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys, GroupKeys
from m6_multimodal_pd.disaggregation.runtime.sockets import HELLO, LOOPBACK, WELCOME, EngineSocket, RouterSocket
from m6_multimodal_pd.errors import PeerLostError
from m6_multimodal_pd.wire import Codec
from tests.m6_multimodal_pd.processes import open_files, process_of

KEYS = GroupKeys.generate()
OTHERS = GroupKeys.generate()
"""Of another group: they open nothing here."""
STRANGE = b"decode-0." + b"5" * 32
MAX_BYTES = 2**20


class Text(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message."""

    text: str


class Picture(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A large message."""

    features: np.ndarray


CODEC: Codec[Text | Picture] = Codec(Text | Picture, MAX_BYTES)

Router = RouterSocket[Text | Picture]
Engine = EngineSocket[Text | Picture]


class Site:
    """Makes sockets, counts what the router has logged as refused, and closes everything."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "m6_multimodal_pd")
        self.caplog = caplog
        self.context = zmq.Context()
        self.opened: list[Any] = []

    @property
    def said(self) -> list[str]:
        """What was refused, and why."""
        return [text for record in self.caplog.records if (text := record.getMessage()).startswith("refused: ")]

    def router(self, address: str = "tcp://127.0.0.1:*", keys: CurveKeys = KEYS.router) -> Router:
        router: Router = RouterSocket(address, codec=CODEC, keys=keys, heartbeat_timeout_s=15.0)
        self.opened.append(router)
        return router

    def engine(self, router: Router | str, name: str = "decode-0", keys: CurveKeys = KEYS.engines) -> Engine:
        address = router if isinstance(router, str) else router.address
        engine: Engine = EngineSocket(address, name=name, codec=CODEC, keys=keys, heartbeat_timeout_s=15.0)
        self.opened.append(engine)
        return engine

    def pair(self, name: str = "decode-0") -> tuple[Router, Engine]:
        """A router and an engine, which hear each other."""
        router = self.router()
        engine = self.engine(router, name)
        greeted(router, engine)
        return router, engine

    def impostor(self, keys: CurveKeys | None) -> tuple["zmq.Socket[bytes]", Engine]:
        """A socket without manners with a router's keys, or with none, and an engine that connects to it."""
        impostor = self.raw(zmq.ROUTER)
        if keys is not None:
            impostor.curve_server = 1
            impostor.curve_publickey, impostor.curve_secretkey = keys.public.encode(), keys.secret.encode()
        return impostor, self.engine(f"tcp://127.0.0.1:{impostor.bind_to_random_port('tcp://127.0.0.1')}")

    def raw(self, kind: int = zmq.DEALER, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        """A socket without manners, for strangers."""
        stranger = self.context.socket(kind)
        stranger.linger = 0
        stranger.rcvtimeo = 10_000
        if identity is not None:
            stranger.setsockopt(zmq.ROUTING_ID, identity)
        self.opened.append(stranger)
        return stranger

    def stranger(
        self, router: Router, identity: bytes | None = None, keys: CurveKeys | None = KEYS.engines
    ) -> "zmq.Socket[bytes]":
        """One that has connected to the router; with its engines' keys it may send, as it likes."""
        stranger = self.raw(identity=identity)
        if keys is not None:
            use(stranger, keys)
        stranger.connect(router.address)
        return stranger

    def monitor(self, stranger: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
        """Where ZeroMQ tells what happens to a stranger's connection."""
        self.opened.append(stranger.get_monitor_socket(events))
        return self.opened[-1]

    def close(self) -> None:
        for each in self.opened:
            each.close()
        self.context.term()


def use(stranger: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    """Give a socket an engine's keys."""
    stranger.curve_publickey, stranger.curve_secretkey = keys.public.encode(), keys.secret.encode()
    stranger.curve_serverkey = keys.trusted.encode()


@pytest.fixture
def site(caplog: pytest.LogCaptureFixture) -> Iterator[Site]:
    site = Site(caplog)
    yield site
    site.close()


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, which looks once and may wait a little itself."""
    deadline = monotonic() + 10
    while monotonic() < deadline:
        found = condition()
        if found:
            return found
    raise AssertionError("it did not happen in 10 seconds")


def greeted(router: Router, engine: Engine) -> None:
    """`engine` and `router` hear each other."""
    engine.send(Text("to the router"))
    assert heard(router) == [(engine.name, Text("to the router"))]
    router.send(engine.name, Text("to the engine"))
    assert heard(engine) == [Text("to the engine")]


def heard(peer: Router | Engine, number: int = 1) -> list[Any]:
    """What `peer` receives, until it is so much."""
    received: list[Any] = []
    until(lambda: received.extend(peer.receive(0.01)) or len(received) >= number)
    return received


def loss(peer: Router | Engine, send: Callable[[], None]) -> str:
    """The error that `send` raises when `peer` has noticed that the other side is gone."""

    def noticed() -> str:
        try:
            send()
        except PeerLostError as error:
            return str(error)
        list(peer.receive(0.01))
        return ""

    return str(until(noticed))


def refusals(site: Site, router: Router, number: int = 1) -> list[tuple[str, Any]]:
    """What got through until so many refusals were logged."""
    received: list[tuple[str, Any]] = []

    def counted() -> bool:
        received.extend(router.receive(0.01))
        return len(site.said) >= number

    until(counted)
    assert len(site.said) == number
    return received


def test_messages_go_both_ways_in_order(site: Site) -> None:
    router = site.router()
    engines = []
    for name in ("prefill-0", "decode-0"):
        engines.append(site.engine(router, name))
        greeted(router, engines[-1])
    assert router.names == ("prefill-0", "decode-0")
    assert all(engine.joined for engine in engines)
    for number in range(600):
        engines[0].send(Text(str(number)))
    received = heard(router, 600)
    assert received == [("prefill-0", Text(str(number))) for number in range(600)]


JUNK = np.random.default_rng(3).bytes(500)
GOOD = CODEC.encode(Text("let me in"))[0]


ATTACKS = [
    (None, [JUNK]),
    (STRANGE, [b""] * 300),
    (STRANGE, [GOOD]),
    (STRANGE, [HELLO, b"a proof"]),
    (STRANGE, [HELLO]),
    (b"decode-1", [HELLO]),
    (b"decode-1." + b"5" * 31, [HELLO]),
    (b"\xff" * 200, [HELLO]),
]
"""Identities and messages."""


@pytest.mark.parametrize(("identity", "frames"), ATTACKS)
def test_a_peer_without_a_hello_is_refused_alone(site: Site, identity: bytes | None, frames: list[bytes]) -> None:
    """It has the engines' keys: a program of another version, say."""
    router, engine = site.pair()
    stranger = site.stranger(router, identity)
    stranger.send_multipart(frames)
    assert refusals(site, router) == []
    greeted(router, engine)
    stranger.send_multipart([GOOD])
    assert refusals(site, router, 2) == []  # a refused hello is no hello
    why = "another engine 'decode-0'" if (identity, frames) == (STRANGE, [HELLO]) else "has not sent a hello"
    assert why in site.said[0] and "\n" not in site.said[0] and len(site.said[0]) < 300
    assert router.names == ("decode-0",)
    assert not stranger.poll(0)  # strangers get no answer
    greeted(router, engine)


@pytest.mark.parametrize(("identity", "frames"), [ATTACKS[0], (b"decode-1." + b"5" * 32, [HELLO])])
@pytest.mark.parametrize(
    "keys",
    [
        None,
        "a password",
        OTHERS.engines,
        msgspec.structs.replace(KEYS.engines, trusted=OTHERS.router.public),
        msgspec.structs.replace(OTHERS.engines, trusted=KEYS.router.public),
        CurveKeys(KEYS.router.public, KEYS.router.secret, KEYS.router.public),
    ],
    ids="no-keys a-password keys-of-another-group another-router-s-key unknown-key the-router-s-own-keys".split(),
)
def test_nothing_of_a_stranger_gets_through_and_an_engine_is_served(
    site: Site, identity: bytes | None, frames: list[bytes], keys: CurveKeys | str | None
) -> None:
    """It knows all but the keys: how messages look, and a name that is free."""
    router, engine = site.pair()
    stranger = site.raw(identity=identity)
    if isinstance(keys, str):
        stranger.plain_username, stranger.plain_password = b"decode-0", keys.encode()
    elif keys is not None:
        use(stranger, keys)
    failures = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    events = site.monitor(stranger, failures | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(router.address)
    stranger.send_multipart(frames)
    stranger.send_multipart([GOOD])
    received: list[Any] = []
    until(lambda: received.extend(router.receive(0.01)) or events.poll(10))
    greeted(router, engine)
    assert received == [] and router.names == ("decode-0",) and not stranger.poll(0)
    assert all("unknown key" in said for said in site.said), "no message was read"


def joined_raw(site: Site, router: Router) -> "zmq.Socket[bytes]":
    """A peer that belongs, but may send anything."""
    peer = site.stranger(router, STRANGE)
    peer.send_multipart([HELLO])
    until(lambda: list(router.receive(0.01)) or "decode-0" in router.names)
    assert peer.recv_multipart() == [WELCOME]
    return peer


@pytest.mark.parametrize(
    "frames",
    [[HELLO], [JUNK], [b""], [GOOD, b""], [GOOD] * 300, [bytes(MAX_BYTES // 2)] * 3],
    ids="hello-twice junk empty frame-too-many many-frames over-the-limit".split(),
)
def test_an_engine_that_sends_junk_is_heard_when_it_makes_sense_again(site: Site, frames: list[bytes]) -> None:
    router = site.router()
    peer = joined_raw(site, router)
    peer.send_multipart(frames)
    peer.send_multipart([GOOD])
    received = refusals(site, router)
    assert (received or heard(router)) == [("decode-0", Text("let me in"))]
    assert router.names == ("decode-0",)


def test_an_oversized_frame_cuts_off_its_sender_and_nobody_else(site: Site) -> None:
    router = site.router()
    engine = site.engine(router, "prefill-0")
    peer = joined_raw(site, router)
    events = site.monitor(peer, zmq.EVENT_DISCONNECTED)
    peer.send_multipart([bytes(2 * MAX_BYTES)])
    until(lambda: events.poll(10))
    assert not site.said  # never taken in
    greeted(router, engine)


def test_a_flood_delays_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_PER_CALL", 50)
    router, engine = site.pair()
    stranger = site.stranger(router)
    for _ in range(500):
        stranger.send(JUNK)
    engine.send(Text("through the flood"))
    received: list[Any] = []
    counts = []

    def served() -> bool:
        before = len(site.said)
        received.extend(router.receive(0.01))
        counts.append(len(site.said) - before)
        return bool(received) and len(site.said) == 500

    until(served)
    assert received == [("decode-0", Text("through the flood"))]
    assert max(counts) <= 50


def half_open(router: Router, number: int) -> list[socket.socket]:
    """Connections to the router without a word."""
    port = int(router.address.rpartition(":")[2])
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.exhaustive
def test_half_open_connections_are_few_and_an_engine_gets_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HANDSHAKE_TIMEOUT_S", 2.0)
    before = open_files()
    router = site.router()
    first = site.engine(router, "prefill-0")
    greeted(router, first)
    connections = half_open(router, 600)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
    connections[-1].sendall(greeting[:11])
    connections[-2].sendall(greeting)
    try:
        until(lambda: sum(map(is_closed, connections)) == 600 - door.MAX_UNADMITTED)
        until(lambda: open_files() - before < 600 + 3 * door.MAX_UNADMITTED)
        engine = site.engine(router)
        greeted(router, engine)
        began = monotonic()
        until(lambda: all(map(is_closed, connections)))
        assert monotonic() - began < 5.0
        greeted(router, engine)
        greeted(router, first)
    finally:
        for connection in connections:
            connection.close()


def test_a_connection_is_counted_before_its_key_is_checked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hello may come as soon as the key is checked: an engine that is counted later would count for ever."""
    num_checked: list[int] = []
    receive = door.recv_monitor_message
    monkeypatch.setattr(door, "recv_monitor_message", lambda own: num_checked.append(len(site.said)) or receive(own))
    monkeypatch.setattr(zmq, "zmq_poll", lambda sockets, timeout: [own.poll(500) for own, _ in sockets])  # for both
    router = site.router()
    site.stranger(router, keys=msgspec.structs.replace(OTHERS.engines, trusted=KEYS.engines.trusted))
    until(lambda: site.said)
    assert num_checked == [0]


def test_a_descriptor_that_is_reused_is_not_closed_for_the_old_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ may have closed a descriptor before its event is read."""
    router, receive = site.router(), door.recv_monitor_message
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        others = [opened.enter_context(socket.create_connection(server.getsockname())) for _ in range(3)]
        reused = [own.fileno() for own in (*others, opened.enter_context(open(os.devnull)))]

        def late(monitor: Any) -> Any:
            return receive(monitor) | {"value": reused.pop()} if reused else receive(monitor)

        monkeypatch.setattr(door, "MAX_UNADMITTED", 1)
        monkeypatch.setattr(door, "recv_monitor_message", late)
        for connection in half_open(router, 4):
            opened.enter_context(connection)
        until(lambda: not reused)
        router.close()
        assert not any(map(is_closed, others))


def test_an_identity_that_lives_cannot_be_taken_over(site: Site) -> None:
    router = site.router()
    peer = joined_raw(site, router)
    thief = site.stranger(router, STRANGE)
    thief.send_multipart([GOOD])
    engine = site.engine(router, "prefill-0")  # comes after the thief, who has had its chance when this one is heard
    greeted(router, engine)
    router.send("decode-0", Text("for the first"))
    assert peer.recv_multipart() == CODEC.encode(Text("for the first"))
    assert not thief.poll(0)
    peer.send_multipart([GOOD])
    assert heard(router) == [("decode-0", Text("let me in"))]


def test_an_engine_that_is_gone_is_noticed_and_its_name_is_free_again(site: Site) -> None:
    router, engine = site.pair()
    too_early = site.engine(router)
    refusals(site, router)
    assert "another engine 'decode-0'" in site.said[0]
    assert too_early.receive() == [] and not too_early.joined
    engine.close()
    assert loss(router, lambda: router.send("decode-0", Text("are you there?"))) == "engine 'decode-0' is gone"
    assert router.names == ()
    greeted(router, site.engine(router))
    too_early.send(Text("late"))
    refusals(site, router, 2)


def test_a_forgotten_engine_is_believed_no_more(site: Site) -> None:
    router, engine = site.pair()
    router.forget("decode-0")
    router.forget("nobody")
    engine.send(Text("a late message"))
    assert refusals(site, router) == []
    with pytest.raises(PeerLostError, match="no engine 'decode-0'"):
        router.send("decode-0", Text("?"))
    other = site.engine(router)
    greeted(router, other)


def sent_until_refused(send: Callable[[], None]) -> int:
    for number in range(2000):
        try:
            send()
        except PeerLostError as error:
            assert "does not read" in str(error)
            return number
    raise AssertionError("2000 messages were taken")


def test_an_engine_that_never_reads_blocks_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_QUEUED", 3)
    router = site.router()
    stuck, engine = site.engine(router, "stuck"), site.engine(router)
    stuck.send(Text("I am here"))
    until(lambda: list(router.receive(0.01)))
    large = Picture(np.zeros(MAX_BYTES // 2, np.uint8))
    sent = sent_until_refused(lambda: router.send("stuck", large))
    assert sent >= 2  # the welcome has taken a place
    greeted(router, engine)
    assert "stuck" in router.names  # it may come to itself
    heard(stuck, sent)


def test_a_stopped_engine_is_missed_while_a_large_message_is_on_its_way(site: Site) -> None:
    """No ping can leave behind that message."""
    codec = Codec(Text | Picture, 2**26)
    router = RouterSocket(LOOPBACK, codec=codec, keys=KEYS.router, heartbeat_timeout_s=1.0)
    site.opened.append(router)
    order = {"identity": STRANGE.decode(), "address": router.address, "messages": [[HELLO.hex()]]}
    with process_of(order | msgspec.to_builtins(KEYS.engines)) as stopped:
        until(lambda: list(router.receive(0.01)) or router.names)
        stopped.send_signal(signal.SIGSTOP)
        router.send("decode-0", Picture(np.zeros(2**25, np.uint8)))
        began = monotonic()
        assert "is gone" in loss(router, lambda: router.send("decode-0", Text("are you there?")))
        assert monotonic() - began < 5.0


def test_an_engine_that_finds_no_router_can_leave(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        engine = site.engine(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert engine.receive() == [] and not engine.joined
        started = monotonic()
        engine.close()
        assert monotonic() - started < 5


@pytest.mark.parametrize("keys", [None, OTHERS.router, KEYS.engines], ids="none another-group an-engine".split())
def test_an_engine_sends_nothing_to_another_than_its_router(site: Site, keys: CurveKeys | None) -> None:
    impostor, engine = site.impostor(keys)
    enough = monotonic() + 2  # a connection that ends before its handshake begins is cut without a word, now and then
    until(lambda: engine.receive(0.01) or engine.was_cut() or monotonic() > enough)
    assert not engine.joined and not impostor.poll(0)


def test_an_engine_that_is_refused_before_its_hello_is_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_slowly(socket: "zmq.Socket[bytes]", address: str) -> None:
        connect(socket, address)
        until(lambda: not socket.poll(10, zmq.POLLOUT))

    connect = zmq.Socket.connect
    monkeypatch.setattr(zmq.Socket, "connect", connect_slowly)
    impostor, engine = site.impostor(KEYS.engines)
    assert engine.was_cut() and not engine.joined and not impostor.poll(0)


def test_an_engine_reads_nothing_before_the_welcome(site: Site) -> None:
    router, engine = site.impostor(KEYS.router)
    identity, *hello = router.recv_multipart()
    assert hello == [HELLO]
    for frames in ([GOOD], [WELCOME, b""], [HELLO], [JUNK]):
        router.send_multipart([identity, *frames])
    received: list[Any] = []
    until(lambda: received.extend(engine.receive(0.01)) or len(site.said) == 4)
    assert received == [] and not engine.joined
    router.send_multipart([identity, WELCOME])
    router.send_multipart([identity, JUNK])
    router.send_multipart([identity, GOOD])
    assert heard(engine) == [Text("let me in")]
    assert engine.joined and len(site.said) == 5


def test_an_engine_does_not_talk_to_whoever_comes_after_its_router(site: Site) -> None:
    router, engine = site.pair()
    address = router.address
    router.close()
    loss(engine, lambda: engine.send(Text("are you there?")))
    successor = site.router(address)
    greeted(successor, site.engine(successor, "other"))
    with pytest.raises(PeerLostError):
        engine.send(Text("still there?"))
    assert not site.said and successor.names == ("other",)


def test_the_largest_message_fits_with_its_encryption(site: Site) -> None:
    router, engine = site.pair()
    largest = Text("x" * (MAX_BYTES - len(CODEC.encode(Text("x" * 70_000))[0]) + 70_000))
    engine.send(largest)
    assert heard(router) == [("decode-0", largest)]
    assert not site.said


def test_an_engine_with_an_unknown_key_is_reported_and_learns_that_it_is_cut_off(site: Site) -> None:
    router, friend = site.pair("friend")
    locked_out = site.engine(router, keys=msgspec.structs.replace(OTHERS.engines, trusted=KEYS.engines.trusted))
    until(locked_out.was_cut)
    assert refusals(site, router) == []
    assert "unknown key" in site.said[0]
    greeted(router, friend)
    assert router.names == ("friend",) and not locked_out.joined


@pytest.mark.parametrize(
    "address",
    [
        *"127.0.0.1:5 tcp://127.0.0.1 tcp://127.0.0.1:x tcp://127.0.0.1:99999 udp://127.0.0.1:5 inproc://x".split(),
        *("ipc://", "ipc://a\0b", "ipc://" + "x" * 500, "ipc:///nowhere/at/all", "tcp://1.2.3.4;127.0.0.1:5", "", 5),
    ],
)
def test_what_is_no_address_is_refused(site: Site, address: Any) -> None:
    with pytest.raises(ConfigError, match="address="):
        site.router(address)


@pytest.mark.parametrize("name", ["decode.0", "x" * 65, "a\n"])
def test_what_an_engine_cannot_be_called_is_refused(site: Site, name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        site.engine("tcp://127.0.0.1:5555", name)


@pytest.mark.parametrize("key", ["", "x" * 39, "~" * 40, "#" * 40, "é" * 40, b"x" * 40, 5])
def test_what_is_no_key_is_refused(key: Any) -> None:
    keys = KEYS.engines
    assert keys.secret not in repr(keys)
    plain = msgspec.to_builtins(keys)
    assert msgspec.convert(plain, CurveKeys) == keys
    if isinstance(key, bytes):
        key = key.decode() + "~"
    for wrong in ({"public": key}, {"secret": key}, {"trusted": key}, {"public": OTHERS.engines.public}):
        with pytest.raises(ValueError) as caught:
            msgspec.convert(plain | wrong, CurveKeys)
        assert keys.secret not in str(caught.value)


def test_a_wait_ends_at_once_when_something_arrives(site: Site) -> None:
    router, engine = site.pair()
    assert list(router.receive(0)) == []
    engine.send(Text("wake up"))
    started = monotonic()
    assert list(router.receive(30)) == [("decode-0", Text("wake up"))]
    router.send("decode-0", Text("wake up"))
    assert engine.receive(30) == [Text("wake up")]
    with ThreadPoolExecutor(1) as other:
        other.submit(router.wake)
        assert list(router.receive(30)) == []
    router.wake()
    assert list(router.receive(30)) == [] and monotonic() - started < 5
    router.close()
    router.wake()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them")
def test_closed_sockets_leave_nothing(site: Site, tmp_path: Path) -> None:
    before = open_files(), threads()
    path = tmp_path / "router"
    for address in ("tcp://127.0.0.1:*", f"ipc://{path}", "ipc://*"):
        router = site.router(address)
        engine = site.engine(router)
        greeted(router, engine)
        assert threads() > before[1]
        router.send("decode-0", Text("never read"))
        for each in (router, engine, router, engine):
            each.close()
        if address != "tcp://127.0.0.1:*":
            assert not Path(router.address.removeprefix("ipc://")).exists()
    assert (open_files(), threads()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_refused_address_leaves_nothing(site: Site) -> None:
    router = site.router()
    before = threads()
    with pytest.raises(ConfigError, match="in use"):
        site.router(router.address)
    assert threads() == before


def test_a_file_that_is_there_is_not_taken_away(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="exists already"):
        site.router(f"ipc://{path}")
    assert path.read_text() == "data"
