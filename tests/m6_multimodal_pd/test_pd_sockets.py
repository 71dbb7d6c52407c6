"""Strangers at the door get nothing through and stop nobody; engines that belong are served all the while."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from m1_single_request.errors import ConfigError, EngineClosedError, EngineUsageError
from m6_multimodal_pd.disaggregation.runtime.credentials import ENGINE, ROUTER, CurveKeys, proof
from m6_multimodal_pd.disaggregation.runtime.endpoint import Refusals
from m6_multimodal_pd.disaggregation.runtime.sockets import HELLO, WELCOME, EngineSocket, RouterSocket
from m6_multimodal_pd.disaggregation.runtime.wire import Codec
from m6_multimodal_pd.errors import PeerLostError, WireError

SECRET = b"known to friends"
WRONG = b"guessed by others"
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
    """Makes sockets, keeps what the router said, and closes everything."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.context = zmq.Context()
        self.opened: list[Any] = []

    def router(self, address: str = "tcp://127.0.0.1:*", **options: Any) -> Router:
        router = RouterSocket(address, codec=CODEC, secret=SECRET, on_refused=self.said.append, **options)
        self.opened.append(router)
        return router

    def engine(self, router: Router | str, name: str = "decode-0", secret: bytes = SECRET, **options: Any) -> Engine:
        address = router if isinstance(router, str) else router.address
        engine = EngineSocket(address, name=name, codec=CODEC, secret=secret, **options)
        self.opened.append(engine)
        return engine

    def raw(self, kind: int = zmq.DEALER, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        """A socket without manners, for strangers."""
        stranger = self.context.socket(kind)
        stranger.linger = 0
        stranger.rcvtimeo = 10_000
        if identity is not None:
            stranger.setsockopt(zmq.ROUTING_ID, identity)
        self.opened.append(stranger)
        return stranger

    def stranger(self, router: Router, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        """One that has connected to the router."""
        stranger = self.raw(identity=identity)
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


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
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
    assert until(lambda: router.receive(0.01)) == [(engine.name, Text("to the router"))]
    router.send(engine.name, Text("to the engine"))
    assert until(lambda: engine.receive(0.01)) == [Text("to the engine")]


def refusals(router: Router, number: int = 1) -> list[tuple[str, Any]]:
    """What got through until so many refusals were counted."""
    received: list[tuple[str, Any]] = []

    def counted() -> bool:
        received.extend(router.receive(0.01))
        return router.num_refused >= number

    until(counted)
    assert router.num_refused == number
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
    received: list[Any] = []
    until(lambda: received.extend(router.receive(0.01)) or len(received) == 600)
    assert received == [("prefill-0", Text(str(number))) for number in range(600)]


def test_arrays_cross(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    features = np.arange(200_000, dtype=np.float32)
    engine.send(Picture(features))
    ((_, message),) = until(lambda: router.receive(0.01))
    assert (message.features == features).all()
    router.send("decode-0", message)
    (echo,) = until(lambda: engine.receive(0.01))
    assert (echo.features == features).all()


JUNK = np.random.default_rng(3).bytes(500)
GOOD = CODEC.encode(Text("let me in"))[0]


@pytest.mark.parametrize(
    ("identity", "frames", "why"),
    [
        (None, [JUNK], "has not said hello"),
        (STRANGE, [b""], "has not said hello"),
        (STRANGE, [b""] * 300, "has not said hello"),
        (STRANGE, [GOOD], "has not said hello"),
        (STRANGE, [HELLO], "has not said hello"),
        (STRANGE, [WELCOME, proof(SECRET, ENGINE, STRANGE)], "has not said hello"),
        (STRANGE, [HELLO, proof(SECRET, ENGINE, STRANGE), b""], "has not said hello"),
        (STRANGE, [HELLO, proof(WRONG, ENGINE, STRANGE)], "wrong secret"),
        (STRANGE, [HELLO, proof(SECRET, ROUTER, STRANGE)], "wrong secret"),
        (STRANGE, [HELLO, proof(SECRET, ENGINE, STRANGE[:-1] + b"6")], "wrong secret"),
        (STRANGE, [HELLO, SECRET], "wrong secret"),
        (STRANGE, [HELLO, b""], "wrong secret"),
        (STRANGE, [HELLO, proof(SECRET, ENGINE, STRANGE)], "another engine 'decode-0'"),
        (b"decode-1", [HELLO, proof(SECRET, ENGINE, b"decode-1")], "has not said hello"),
        (b"\xff" * 200, [HELLO, proof(SECRET, ENGINE, b"\xff" * 200)], "has not said hello"),
    ],
)
def test_a_stranger_is_refused_and_an_engine_is_served(
    site: Site, identity: bytes | None, frames: list[bytes], why: str
) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    stranger = site.stranger(router, identity)
    stranger.send_multipart(frames)
    assert refusals(router) == []
    greeted(router, engine)
    stranger.send_multipart([GOOD])
    assert refusals(router, 2) == []  # a refused hello is no hello
    assert why in site.said[0] and "\n" not in site.said[0] and len(site.said[0]) < 300
    assert router.names == ("decode-0",)
    assert not stranger.poll(0)  # strangers get no answer
    greeted(router, engine)


def joined_raw(site: Site, router: Router) -> "zmq.Socket[bytes]":
    """A peer that belongs, but may send anything."""
    peer = site.stranger(router, STRANGE)
    peer.send_multipart([HELLO, proof(SECRET, ENGINE, STRANGE)])
    until(lambda: router.receive(0.01) or "decode-0" in router.names)
    assert peer.recv_multipart() == [WELCOME, proof(SECRET, ROUTER, STRANGE)]
    return peer


@pytest.mark.parametrize(
    "frames",
    [
        [HELLO, proof(SECRET, ENGINE, STRANGE)],
        [JUNK],
        [b""],
        [GOOD, b""],
        [GOOD] * 300,
        [bytes(MAX_BYTES // 2)] * 3,
    ],
    ids="hello-twice junk empty frame-too-many many-frames over-the-limit".split(),
)
def test_an_engine_that_sends_junk_is_heard_when_it_makes_sense_again(site: Site, frames: list[bytes]) -> None:
    router = site.router()
    peer = joined_raw(site, router)
    peer.send_multipart(frames)
    peer.send_multipart([GOOD])
    received = refusals(router)
    assert (received or until(lambda: router.receive(0.01))) == [("decode-0", Text("let me in"))]
    assert router.names == ("decode-0",)


def test_an_oversized_frame_cuts_off_its_sender_and_nobody_else(site: Site) -> None:
    router = site.router()
    engine = site.engine(router, "prefill-0")
    peer = joined_raw(site, router)
    events = site.monitor(peer, zmq.EVENT_DISCONNECTED)
    peer.send_multipart([bytes(2 * MAX_BYTES)])
    until(lambda: events.poll(10))
    assert router.num_refused == 0  # never taken in
    greeted(router, engine)


def test_noise_that_is_no_protocol_is_survived(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    random = np.random.default_rng(11)
    port = int(router.address.rpartition(":")[2])
    for size in (1, 9, 10, 64, 5000, 100_000):
        with socket.create_connection(("127.0.0.1", port)) as noise:
            try:
                noise.sendall(random.bytes(size))
                noise.sendall(b"\xff" + bytes(8) + b"\x7f" + random.bytes(size))  # begins as ZeroMQ does
            except OSError:
                pass  # thrown out
        greeted(router, engine)
    assert router.names == ("decode-0",)


def test_a_flood_delays_nobody_and_is_not_a_flood_of_lines(site: Site) -> None:
    router = site.router(max_per_call=50)
    engine = site.engine(router)
    greeted(router, engine)
    stranger = site.stranger(router)
    for _ in range(500):
        stranger.send(JUNK)
    until(lambda: router.wait(0.01).arrived)
    engine.send(Text("through the flood"))
    received: list[Any] = []
    counts = []

    def served() -> bool:
        before = router.num_refused
        received.extend(router.receive(0.01))
        counts.append(router.num_refused - before)
        return bool(received) and router.num_refused == 500

    started = monotonic()
    until(served)
    assert received == [("decode-0", Text("through the flood"))]
    assert max(counts) == 50
    assert len(site.said) <= 2 + monotonic() - started


def test_refusals_are_reported_once_a_second() -> None:
    now, said = [0.0], []
    refused = Refusals(said.append, clock=lambda: now[0])
    for second in (0.0, 0.1, 0.2, 1.0, 1.5, 2.5, 9.0):
        now[0] = second
        refused.add(f"at {second}")
    assert said == ["at 0.0", "at 1.0 (2 others before it)", "at 2.5 (1 others before it)", "at 9.0"]
    assert refused.total == 7


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
    assert until(lambda: router.receive(0.01)) == [("decode-0", Text("let me in"))]


def test_an_engine_that_is_gone_is_noticed_and_its_name_is_free_again(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    too_early = site.engine(router)
    refusals(router)
    assert "another engine 'decode-0'" in site.said[0]
    assert too_early.receive() == [] and not too_early.joined
    engine.close()

    def noticed() -> str:
        try:
            router.send("decode-0", Text("are you there?"))
        except PeerLostError as error:
            return str(error)
        router.wait(0.01)
        return ""

    assert until(noticed) == "engine 'decode-0' is gone"
    assert router.names == ()
    greeted(router, site.engine(router))
    too_early.send(Text("late"))
    refusals(router, 2)


def test_a_forgotten_engine_is_believed_no_more(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    router.forget("decode-0")
    router.forget("nobody")
    engine.send(Text("a late message"))
    assert refusals(router) == []
    with pytest.raises(PeerLostError, match="no engine 'decode-0'"):
        router.send("decode-0", Text("?"))
    other = site.engine(router)
    greeted(router, other)


def test_a_message_to_nobody_is_refused(site: Site) -> None:
    router = site.router()
    with pytest.raises(PeerLostError, match="no engine 'decode-7'"):
        router.send("decode-7", Text("hello?"))


def test_a_message_over_the_limit_is_refused_before_it_leaves(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    large = Picture(np.zeros(MAX_BYTES, np.uint8))
    with pytest.raises(WireError):
        router.send("decode-0", large)
    with pytest.raises(WireError):
        engine.send(large)
    greeted(router, engine)


def sent_until_refused(send: Callable[[], None]) -> int:
    for number in range(2000):
        try:
            send()
        except PeerLostError as error:
            assert "does not read" in str(error)
            return number
    raise AssertionError("2000 messages were taken")


def test_an_engine_that_never_reads_blocks_nobody(site: Site) -> None:
    router = site.router(max_queued=3)
    stuck, engine = site.engine(router, "stuck", max_queued=3), site.engine(router)
    stuck.send(Text("I am here"))
    until(lambda: router.receive(0.01))
    large = Picture(np.zeros(MAX_BYTES // 2, np.uint8))
    sent = sent_until_refused(lambda: router.send("stuck", large))
    assert sent >= 2  # the welcome has taken a place
    greeted(router, engine)
    assert "stuck" in router.names  # it may come to itself
    received: list[Any] = []
    until(lambda: received.extend(stuck.receive(0.01)) or len(received) == sent)


STOPPED = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.setsockopt(zmq.ROUTING_ID, bytes.fromhex(sys.argv[2]))
socket.connect(sys.argv[1])
socket.send_multipart([bytes.fromhex(frame) for frame in sys.argv[3:]])
sys.stdin.read()
"""


def test_a_stopped_engine_is_missed_while_a_large_message_is_on_its_way(site: Site) -> None:
    """No ping can leave behind that message."""
    codec = Codec(Text | Picture, 2**26)
    router = RouterSocket(codec=codec, secret=SECRET, heartbeat_timeout_s=1.0)
    site.opened.append(router)
    frames = [STRANGE, HELLO, proof(SECRET, ENGINE, STRANGE)]
    command = [sys.executable, "-c", STOPPED, router.address, *[frame.hex() for frame in frames]]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as stopped:
        try:
            until(lambda: router.receive(0.01) or router.names)
            stopped.send_signal(signal.SIGSTOP)
            router.send("decode-0", Picture(np.zeros(2**25, np.uint8)))
            began = monotonic()
            with pytest.raises(PeerLostError, match="is gone"):
                until(lambda: router.send("decode-0", Text("are you there?")) or router.wait(0.01).watched)
            assert monotonic() - began < 5.0
        finally:
            stopped.kill()


def test_a_router_that_never_reads_blocks_no_engine(site: Site) -> None:
    router = site.router(max_queued=3)
    engine = site.engine(router, max_queued=3)
    assert sent_until_refused(lambda: engine.send(Picture(np.zeros(MAX_BYTES // 2, np.uint8)))) >= 2  # and the hello


def test_an_engine_that_finds_no_router_can_leave(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        engine = site.engine(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert engine.receive() == [] and not engine.joined
        started = monotonic()
        engine.close()
        assert monotonic() - started < 5


def test_an_engine_believes_nobody_before_the_welcome(site: Site) -> None:
    impostor = site.raw(zmq.ROUTER)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    said: list[str] = []
    engine = site.engine(f"tcp://127.0.0.1:{port}", on_refused=said.append)
    identity, *hello = impostor.recv_multipart()
    assert hello == [HELLO, proof(SECRET, ENGINE, identity)]
    assert SECRET not in b"".join([identity, *hello])
    for frames in ([GOOD], [WELCOME, hello[1]], [WELCOME, proof(WRONG, ROUTER, identity)], [WELCOME], [JUNK]):
        impostor.send_multipart([identity, *frames])
    received: list[Any] = []
    until(lambda: received.extend(engine.receive(0.01)) or engine.num_refused == 5)
    assert received == [] and not engine.joined and len(said) == 1
    impostor.send_multipart([identity, WELCOME, proof(SECRET, ROUTER, identity)])
    impostor.send_multipart([identity, JUNK])
    impostor.send_multipart([identity, GOOD])
    assert until(lambda: engine.receive(0.01)) == [Text("let me in")]
    assert engine.joined and engine.num_refused == 6


def test_an_engine_does_not_talk_to_whoever_comes_after_its_router(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    address = router.address
    router.close()

    def noticed() -> bool:
        try:
            engine.send(Text("are you there?"))
        except PeerLostError:
            return True
        engine.wait(0.01)
        return False

    until(noticed)
    successor = site.router(address)
    greeted(successor, site.engine(successor, "other"))
    with pytest.raises(PeerLostError):
        engine.send(Text("still there?"))
    assert successor.num_refused == 0 and successor.names == ("other",)


def test_the_right_keys_open(site: Site) -> None:
    theirs, ours = CurveKeys.generate()
    router = site.router(keys=theirs)
    engine = site.engine(router, keys=ours)
    greeted(router, engine)
    largest = Text("x" * (MAX_BYTES - len(CODEC.encode(Text("x" * 70_000))[0]) + 70_000))
    engine.send(largest)
    assert until(lambda: router.receive(0.01)) == [("decode-0", largest)]
    assert router.num_refused == 0


def test_a_wrong_key_does_not(site: Site) -> None:
    theirs, ours = CurveKeys.generate()
    _, other = CurveKeys.generate()
    router = site.router(keys=theirs)
    friend = site.engine(router, "friend", keys=ours)
    greeted(router, friend)
    locked_out = site.engine(router, keys=replace(other, trusted=ours.trusted))
    locked_out.send(Text("let me in"))
    assert refusals(router) == []
    assert "unknown key" in site.said[0]
    greeted(router, friend)
    assert router.names == ("friend",) and not locked_out.joined


@pytest.mark.parametrize("mistaken", [False, True], ids=["no key", "another router's key"])
def test_a_peer_that_does_not_know_the_routers_key_gets_nothing_through(site: Site, mistaken: bool) -> None:
    theirs, ours = CurveKeys.generate()
    router = site.router(keys=theirs)
    stranger = site.raw(identity=STRANGE)
    if mistaken:
        stranger.curve_publickey, stranger.curve_secretkey = ours.public.encode(), ours.secret.encode()
        stranger.curve_serverkey = CurveKeys.generate()[0].public.encode()
    failures = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    events = site.monitor(stranger, failures)
    stranger.connect(router.address)
    stranger.send_multipart([HELLO, proof(SECRET, ENGINE, STRANGE)])
    stranger.send_multipart([GOOD])
    received: list[Any] = []
    until(lambda: received.extend(router.receive(0.01)) or events.poll(10))
    assert recv_monitor_message(events)["event"] & failures
    greeted(router, site.engine(router, "friend", keys=ours))
    assert received == [] and router.names == ("friend",)


def test_keys_do_not_replace_the_secret(site: Site) -> None:
    theirs, ours = CurveKeys.generate()
    router = site.router(keys=theirs)
    site.engine(router, secret=WRONG, keys=ours)
    assert refusals(router) == []
    assert "wrong secret" in site.said[0]


@pytest.mark.parametrize(
    "address",
    "tcp://0.0.0.0:* tcp://*:* tcp://192.168.1.5:5555 tcp://[::]:* tcp://localhost:* tcp://eth0:*"
    " tcp://127.0.0.1.example.org:80".split(),
)
def test_an_address_that_others_can_reach_needs_keys(site: Site, address: str) -> None:
    for make in (site.router, site.engine):
        with pytest.raises(ConfigError, match="CURVE keys"):
            make(address)


def test_with_keys_every_address_may_be_used(site: Site) -> None:
    theirs, ours = CurveKeys.generate()
    router = site.router("tcp://0.0.0.0:*", keys=theirs)
    greeted(router, site.engine(router.address.replace("0.0.0.0", "127.0.0.1"), keys=ours))


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"secret": b"short"}, "16 random bytes"),
        ({"secret": "x" * 20}, "16 random bytes"),
        ({"name": "decode.0"}, "name="),
        ({"name": "x" * 65}, "name="),
        ({"name": "a\n"}, "name="),
        ({"max_queued": 0}, "max_queued="),
        ({"keys": CurveKeys.generate()[1], "trust": ()}, "one router"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(site: Site, options: dict[str, Any], why: str) -> None:
    if "trust" in options:
        options = {"keys": replace(options["keys"], trusted=frozenset(options["trust"]))}
    with pytest.raises(ConfigError, match=why) as caught:
        site.engine("tcp://127.0.0.1:5555", **options)
    assert "short" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "x" * 39, "~" * 40, "#" * 40, "é" * 40, b"x" * 40, 5])
def test_what_is_no_key_is_refused(key: Any) -> None:
    keys, other = CurveKeys.generate()
    assert keys.secret not in repr(keys)
    for wrong in ({"public": key}, {"secret": key}, {"trusted": frozenset({key})}, {"public": other.public}):
        with pytest.raises(ConfigError) as caught:
            replace(keys, **wrong)
        assert keys.secret not in str(caught.value)


def test_a_wait_ends_at_once_when_something_arrives(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    assert router.wait(0) == (False, False)
    engine.send(Text("wake up"))
    started = monotonic()
    assert router.wait(30) == (True, False)
    assert monotonic() - started < 5
    assert router.receive() == [("decode-0", Text("wake up"))]
    router.send("decode-0", Text("wake up"))
    assert engine.wait(30) == (True, False)


def test_a_wait_ends_at_once_when_the_parent_has_died(site: Site) -> None:
    engine = site.engine(site.router())
    ours, theirs = os.pipe()
    try:
        assert engine.wait(0, watched=ours).watched is False
        os.close(theirs)
        started = monotonic()
        assert engine.wait(30, watched=ours) == (False, True)
        assert monotonic() - started < 5
    finally:
        os.close(ours)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them")
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keys"])
def test_closed_sockets_leave_nothing(tmp_path: Path, keyed: bool) -> None:
    before = open_files(), threads()
    keys = CurveKeys.generate() if keyed else (None, None)
    path = tmp_path / "router"
    for address in ("tcp://127.0.0.1:*", f"ipc://{path}", "ipc://*"):
        router: Router = RouterSocket(address, codec=CODEC, secret=SECRET, keys=keys[0])
        engine: Engine = EngineSocket(router.address, name="decode-0", codec=CODEC, secret=SECRET, keys=keys[1])
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
        site.router(router.address, keys=CurveKeys.generate()[0])
    assert threads() == before


def test_a_file_that_is_there_is_not_taken_away(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="exists already"):
        site.router(f"ipc://{path}")
    assert path.read_text() == "data"


def test_a_closed_socket_says_so(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    router.close()
    engine.close()
    for use in (
        router.receive,
        lambda: router.send("decode-0", Text("x")),
        lambda: router.wait(0),
        lambda: router.forget("decode-0"),
        engine.receive,
        lambda: engine.send(Text("x")),
    ):
        with pytest.raises(EngineClosedError):
            use()


def test_a_socket_belongs_to_its_thread(site: Site) -> None:
    router = site.router()
    engine = site.engine(router)
    greeted(router, engine)
    caught: list[Exception] = []

    def elsewhere() -> None:
        for use in (router.receive, router.close, lambda: router.send("decode-0", Text("x")), engine.receive):
            try:
                use()
            except EngineUsageError as error:
                caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 4
    greeted(router, engine)
