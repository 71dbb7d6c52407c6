"""The router among engines that are nothing but sockets: what it says to whom, and to whom it says nothing more."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.router import WATCHDOG_GRACE_S, Router
from m6_multimodal_pd.disaggregation.runtime import messages, socket_links
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys
from m6_multimodal_pd.disaggregation.runtime.socket_links import SocketLinks
from m6_multimodal_pd.disaggregation.runtime.sockets import EngineSocket
from m6_multimodal_pd.wire import Codec
from tests.m6_multimodal_pd.items import make_req
from tests.m6_multimodal_pd.pd_engines import Listener

MAX_BYTES = 2**24
VOCABULARY = "0" * 64


class Site:
    """A router, and sockets that pass for engines."""

    def __init__(self, keys: Path) -> None:
        self.keys = read_keys(keys)
        config = DisaggregationConfig(address="tcp://127.0.0.1:*", key_file=keys)
        self.links = SocketLinks("tcp://127.0.0.1:*", self.keys.router, config)
        self.listener = Listener()
        tracer = Tracer()
        tracer.attach(self.listener)
        self.router = Router(links=self.links, config=config, vocabulary=VOCABULARY, tracer=tracer)
        self.engines: dict[str, EngineSocket[Any]] = {}
        self.heard: dict[str, list[Any]] = {}

    def join(self, name: str, role: messages.Role) -> None:
        """An engine joins."""
        if self.router.max_model_len is None:
            self.router.fix_length(2**20, StopChecker(eos_token_ids=(), max_model_len=2**20))
        engine = self.connect(name)
        engine.send(messages.Joined(role, 16, 2**20, 2**20, "float32[2, 16]", "tiny", VOCABULARY))
        self.listen_until(lambda: name in self.router.members, self.router.receive)

    def join_both(self) -> None:
        """A decode engine and a prefill engine join."""
        self.join("decode-0", "decode")
        self.join("prefill-0", "prefill")

    def connect(self, name: str) -> EngineSocket[Any]:
        """An engine that has said nothing yet."""
        engine: EngineSocket[Any] = EngineSocket(
            self.links.socket.address,
            name=name,
            codec=Codec(messages.ToEngine, MAX_BYTES),
            keys=self.keys.engines,
            heartbeat_timeout_s=15.0,
        )
        self.engines[name], self.heard[name] = engine, []
        return engine

    def listen_until(self, happens: Callable[[], object], listen: Callable[[float], object] | None = None) -> None:
        for _ in range(1000):
            if happens():
                return
            (listen or self.router.listen)(0.01)
        raise AssertionError("it did not happen")

    def ask(self, number: int) -> int:
        """A request comes; returns its room."""
        self.router.add_request(make_req(number, [5, 6, 7]))
        self.router.update(0.0)
        return max(event.room for event in self.listener.events("request_routed") if event.rid == f"r{number}")

    def read_until(self, kind: type, room: int, name: str) -> None:
        """Let an engine read until it has heard of a room."""
        heard, receive = self.heard[name], self.engines[name].receive
        self.listen_until(
            lambda: any(isinstance(message, kind) and message.room == room for message in heard),
            lambda timeout_s: heard.extend(receive(timeout_s)),
        )

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.links.socket.close()


@pytest.fixture
def site(keys: Path) -> Iterator[Site]:
    made = Site(keys)
    yield made
    made.close()


@pytest.mark.exhaustive
def test_an_engine_with_thousands_of_requests_may_be_lost_and_the_others_stay(site: Site) -> None:
    """All that is said at once then, to cancel and to begin anew, waits for them to read it."""
    site.join_both()
    for number in range(3000):
        site.router.add_request(make_req(number, [5, 6, 7]))
    site.router.update(0.0)
    site.join("decode-1", "decode")
    site.router.lose("decode-0", "for a test")
    site.router.update(0.0)
    assert set(site.router.members) == {"decode-1", "prefill-0"}
    assert len(site.router.attempts) == 3000


def test_a_request_whose_tokens_have_a_gap_is_tried_anew_behind_those_that_came(site: Site) -> None:
    site.join_both()
    room = site.ask(0)
    for first in (0, 3):
        site.engines["decode-0"].send(messages.Tokens(room, first, (7,), (None,), None, 0, 0, 0))
    site.read_until(messages.Decode, room, "decode-0")
    site.listen_until(lambda: room not in site.router.attempts)
    site.router.update(0.0)
    (attempt,) = site.router.attempts.values()
    site.read_until(messages.Decode, attempt.room, "decode-0")
    assert [m.job.output_token_ids for m in site.heard["decode-0"] if isinstance(m, messages.Decode)] == [(), (7,)]
    assert messages.Cancel(room) in site.heard["decode-0"] and attempt.number == 2


def test_what_the_router_fails_at_costs_the_engine_that_said_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not handed out again and again, with everybody else's words behind it."""
    site.join_both()

    def broken(name: str, told: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(site.router, "_pass_on", broken)
    site.engines["prefill-0"].send(messages.StepEvents(1, ()))
    decode = site.router.members["decode-0"]
    before = decode.last_heard
    site.engines["decode-0"].send(messages.Heartbeat())
    site.listen_until(lambda: decode.last_heard > before and list(site.router.members) == ["decode-0"])
    (lost,) = site.listener.events("engine_lost")
    assert lost.name == "prefill-0" and "a bug of ours" in lost.why


@pytest.mark.parametrize("has_request", [True, False])
def test_an_engine_with_a_request_that_sends_nothing_for_long_is_lost(site: Site, has_request: bool) -> None:
    """Its watchdog should have ended it. Without requests it has nothing to send."""
    site.join_both()
    if has_request:
        site.ask(0)
    for member in site.router.members.values():
        member.last_heard -= site.router.config.step_timeout_s + WATCHDOG_GRACE_S + 1.0
    site.router.listen(0.0)
    lost = [event.name for event in site.listener.events("engine_lost")]
    assert lost == (["decode-0", "prefill-0"] if has_request else [])


def test_tokens_that_arrive_between_two_steps_are_reported_by_the_next_one(site: Site) -> None:
    """A call such as `stats` listens, too."""
    site.join_both()
    room = site.ask(0)
    site.engines["decode-0"].send(messages.Tokens(room, 0, (7,), (None,), None, 0, 0, 0))
    req = site.router.requests["r0"]
    site.listen_until(lambda: req.output_ids)
    assert site.router.update(0.0) == [req]
    assert site.router.update(0.0) == []


@pytest.mark.parametrize("told", [(), (messages.LengthFitted("decode", 2**20, False),)], ids=["it loads", "it waits"])
def test_an_engine_that_dies_before_it_has_joined_is_not_waited_for_and_leaves_its_name(
    site: Site, told: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_links, "PROBE_EVERY_S", 0.0)
    first = site.connect("decode-0")
    for message in told:
        first.send(message)
    site.listen_until(lambda: first.joined or first.receive())
    site.listen_until(lambda: len(site.router.fitted) == len(told))
    first.close()
    site.listen_until(lambda: not site.links.socket.names)
    assert not site.router.fitted, "its length counts no more"
    site.join("decode-0", "decode")
