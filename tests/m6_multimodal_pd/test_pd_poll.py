"""The two ends of a transfer: the receiver alone, and both over a channel that loses, doubles and mixes up messages.

The machine at the end plays what two engines do with their ends (`prefill_side.py`, `decode_side.py`): the messages are
theirs, and what a message changes, and which message follows, is theirs, too. Only the pages are numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m6_multimodal_pd.disaggregation.poll import TRANSITIONS, KVPoll, KVReceiver, KVSender, Transfer
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    FirstToken,
    PeerMessage,
    Preallocated,
    Received,
    RoomFailed,
    Ticket,
)
from m6_multimodal_pd.errors import TransferError
from tests.support.amounts import examples

FAILED, BOOTSTRAPPING, _, _, SUCCESS = KVPoll
PAGE_SIZE = 4


@dataclass
class Changes:
    """The transitions of one end, as it tells of them."""

    told: list[tuple[KVPoll, KVPoll]] = field(default_factory=list)

    def __call__(self, before: KVPoll, after: KVPoll, why: str) -> None:
        assert why
        self.told.append((before, after))


def take(end: KVReceiver, number: int, pages: range) -> bool:
    """What an engine does with a chunk."""
    if not end.expects(number, pages):
        return False
    end.arrived(pages)
    return True


def known(end: Transfer) -> dict[str, Any]:
    """All that an end knows."""
    found = {name: value for name, value in vars(end).items() if name != "_on_change"}
    return found | {"changes": list(end._on_change.told)}  # type: ignore[attr-defined]


def unchanged(end: Transfer, verb: Callable[..., bool], *told: Any) -> None:
    """A message has no effect, and the end says so."""
    before = known(end)
    assert verb(*told) is False and known(end) == before


def ends(num_tokens: int = 10) -> tuple[KVSender, KVReceiver]:
    """Both ends of a transfer of this length."""
    settings: dict[str, Any] = {"num_tokens": num_tokens, "page_size": PAGE_SIZE}
    return KVSender(7, on_change=Changes(), **settings), KVReceiver(7, on_change=Changes(), **settings)


def test_what_comes_too_early_too_late_or_twice_changes_nothing() -> None:
    p, d = ends()
    failed = ends()[1]
    assert p.preallocated(0) and d.preallocated(0) and failed.fail("a test")
    unchanged(p, p.preallocated, 0)
    unchanged(d, d.preallocated, 0)
    p.sent(range(3))
    unchanged(p, p.received)  # the first token is still to be sent
    assert d.first_token_arrived(1)
    unchanged(d, d.first_token_arrived, 2)
    assert take(d, 0, range(3)) and d.complete()
    p.has_sent_first_token = True
    assert p.received()
    unchanged(p, p.received)
    for end in (d, failed):
        unchanged(end, end.expects, 0, range(1))
        unchanged(end, end.expects, 99, range(5, 99))
        unchanged(end, end.first_token_arrived, 99)
        unchanged(end, end.complete)
        unchanged(end, end.fail, "again")


def test_pages_are_ready_when_they_are_full_and_the_last_with_the_last_token() -> None:
    p, _ = ends(10)
    p.preallocated(0)
    ready = [list(p.pages_ready(num_computed, at_most=99)) for num_computed in range(11)]
    assert ready == [*[[]] * 4, *[[0]] * 4, *[[0, 1]] * 2, [0, 1, 2]]


# --- the receiver -----------------------------------------------------------------------------------------------------


def could_be_complete(end: KVReceiver) -> bool:
    """Whether chunks that may still come make it complete."""
    if end.announced is None:
        return True
    pages, chunks = end.end_page - end.next_page, end.announced - end.num_chunks
    return min(pages, 1) <= chunks <= pages


SMALL = st.integers(0, 5)
STARTS = st.sampled_from([0, 4, 8, 3])
CLAIMS = st.one_of(
    st.tuples(st.just("chunk"), SMALL, SMALL, SMALL),
    st.tuples(st.just("next"), st.integers(0, 3)),
    st.tuples(st.just("told"), SMALL),
    st.tuples(st.just("room"), STARTS),
)


@given(num_tokens=st.integers(1, 20), start=STARTS, claims=st.lists(CLAIMS, max_size=20))
@example(num_tokens=10, start=-4, claims=[])
@example(num_tokens=10, start=12, claims=[])
@example(num_tokens=10, start=3, claims=[("chunk", 0, 0, 1)])
@example(num_tokens=10, start=0, claims=[("chunk", 1, 0, 1), ("chunk", 0, 1, 1), ("chunk", 0, 0, 4)])
def test_a_receiver_takes_each_page_once_or_refuses(num_tokens: int, start: int, claims: list[Any]) -> None:
    _, end = ends(num_tokens)
    taken: list[int] = []
    for claim in [("room", start), *claims]:
        before = known(end)
        try:
            match claim:
                case "chunk", number, first, count:
                    if take(end, number, range(first, first + count)):
                        assert number == before["num_chunks"], "in its turn"
                        taken += range(first, first + count)
                case "next", count:
                    pages = range(end.next_page, end.next_page + count)
                    if take(end, end.num_chunks, pages):
                        taken += pages
                case "told", count:
                    end.first_token_arrived(count)
                case "room", num_cached:
                    end.preallocated(num_cached)
        except TransferError:
            assert known(end) == before
        end.complete()
        assert end.start % PAGE_SIZE == 0 and 0 <= end.start <= num_tokens, "whole pages of the prompt"
        assert taken == list(range(end.start // PAGE_SIZE, end.next_page)), "each once, and in order"
        assert (end.state is SUCCESS) == (end.num_chunks == end.announced), "then, and not before"
        assert end.next_page <= end.end_page and (end.state is not SUCCESS or end.next_page == end.end_page)
        assert end.state is not BOOTSTRAPPING or (end.announced is None and not taken), "nothing comes without room"
        assert could_be_complete(end), "nobody waits for what cannot come"


# --- both, and a channel ----------------------------------------------------------------------------------------------


class Room:
    """Both ends of a transfer, what is on its way between them, and what has come of it."""

    def __init__(self, number: int, *, num_tokens: int, page_size: int, num_cached: int) -> None:
        settings: dict[str, Any] = {"num_tokens": num_tokens, "page_size": page_size}
        self.number, self.num_cached = number, num_cached
        self.sender = KVSender(number, on_change=Changes(), **settings)
        self.receiver = KVReceiver(number, on_change=Changes(), **settings)
        self.num_computed = 0
        self.taken: list[int] = []
        self.has_first_token = False
        self.channel: list[PeerMessage] = []
        """What was said, in order."""
        self.final: dict[str, KVPoll] = {}
        """By side: the first final state that was seen."""

    # --- what engines do ----------------------------------------------------------------------------------------------

    def take_room(self) -> None:
        if self.receiver.preallocated(self.num_cached):
            self.channel.append(Preallocated(self.number, self.num_cached))

    def compute(self, num_tokens: int) -> None:
        """A piece of the prompt, once there is room for it."""
        if self.sender.state is not BOOTSTRAPPING:
            self.num_computed = min(self.num_computed + num_tokens, self.sender.num_tokens)

    def send(self, at_most: int) -> None:
        """The next pages, or the first token behind the last."""
        end = self.sender
        if end.state is BOOTSTRAPPING or end.state.is_final or end.has_sent_first_token:
            return
        pages = end.pages_ready(self.num_computed, at_most=at_most)
        assert len(pages) <= at_most
        assert all((page + 1) * end.page_size <= self.num_computed for page in pages[:-1]), "all but the last are full"
        if pages:
            number = end.sent(pages)
            self.channel.append(Chunk(self.number, number, pages.start, len(pages), Ticket(number, "segment", 1, 0)))
        elif self.num_computed == end.num_tokens:
            end.has_sent_first_token = True
            self.channel.append(FirstToken(self.number, end.num_chunks, 5, None, None, 0))

    def fail(self, end: Transfer) -> None:
        if end.fail("a test"):
            self.channel.append(RoomFailed(self.number, "a test"))

    def hear(self, message: PeerMessage) -> None:
        """The side that a message is for does what it does with it. A refusal has changed nothing, and is the end."""
        sides: list[Transfer] = [self.sender, self.receiver]
        before = [known(end) for end in sides]
        try:
            match message:
                case Preallocated(_, start):
                    self.sender.preallocated(start)
                case Received():
                    self.sender.received()
                case Chunk(_, number, first, count):
                    if take(self.receiver, number, range(first, first + count)):
                        self.taken += range(first, first + count)
                        self._join_if_complete()
                case FirstToken(_, num_chunks):
                    if self.receiver.first_token_arrived(num_chunks):
                        self.has_first_token = True
                        self._join_if_complete()
                case RoomFailed():
                    for end in sides:
                        end.fail("the other side says so")
        except TransferError:
            assert [known(end) for end in sides] == before
            self.fail(self.sender if isinstance(message, Preallocated | Received) else self.receiver)

    def _join_if_complete(self) -> None:
        if self.receiver.complete():
            self.channel.append(Received(self.number))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for side, end in (("sender", self.sender), ("receiver", self.receiver)):
            assert end.state is self.final.get(side, end.state), f"the {side}'s state was final"
            if end.state.is_final:
                self.final[side] = end.state
            told: list[tuple[KVPoll, KVPoll]] = end._on_change.told  # type: ignore[attr-defined]
            assert all(after in TRANSITIONS[before] for before, after in told)
            states = [BOOTSTRAPPING, *(after for _, after in told)]
            assert [before for before, _ in told] == states[:-1] and states[-1] is end.state, "it tells of all of them"
        first_page = self.num_cached // self.receiver.page_size
        assert self.taken == list(range(first_page, first_page + len(self.taken))), "each page once, and in order"
        assert first_page + len(self.taken) <= self.receiver.end_page
        if self.receiver.state is SUCCESS:
            assert self.has_first_token and self.receiver.announced == self.receiver.num_chunks
            assert first_page + len(self.taken) == self.receiver.end_page
        if self.sender.state is SUCCESS:
            assert self.receiver.state is SUCCESS and self.sender.num_chunks == self.receiver.num_chunks


LENGTHS = st.integers(1, 20)
PAGE_SIZES = st.sampled_from([1, 3, 4, 16])


class TwoEnds(RuleBasedStateMachine):
    """A request in a room, and, if that fails, in another one; what was said of the first may still come."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[Room] = []

    @precondition(lambda self: not self.rooms or (len(self.rooms) == 1 and self.rooms[0].sender.state is FAILED))
    @rule(num_tokens=LENGTHS, page_size=PAGE_SIZES, cached=st.integers(0, 20))
    def enter(self, num_tokens: int, page_size: int, cached: int) -> None:
        num_cached = min(cached, num_tokens) // page_size * page_size
        room = Room(len(self.rooms), num_tokens=num_tokens, page_size=page_size, num_cached=num_cached)
        self.rooms.append(room)
        room.take_room()

    @precondition(lambda self: self.rooms)
    @rule(num_tokens=st.integers(1, 20), at_most=st.integers(1, 5), times=st.integers(1, 4))
    def work(self, num_tokens: int, at_most: int, times: int) -> None:
        for _ in range(times):
            self.rooms[-1].compute(num_tokens)
            self.rooms[-1].send(at_most)

    @precondition(lambda self: any(room.channel for room in self.rooms))
    @rule(data=st.data(), comes_again=st.booleans())
    def deliver(self, data: st.DataObject, comes_again: bool) -> None:
        """Any message, of any room; perhaps it will come once more."""
        room = data.draw(st.sampled_from([room for room in self.rooms if room.channel]))
        index = data.draw(st.integers(0, len(room.channel) - 1))
        message = room.channel[index] if comes_again else room.channel.pop(index)
        self.rooms[message.room].hear(message)  # type: ignore[union-attr]

    @precondition(lambda self: any(room.channel for room in self.rooms))
    @rule(times=st.integers(1, 8))
    def deliver_in_turn(self, times: int) -> None:
        room = next(room for room in reversed(self.rooms) if room.channel)
        for message in room.channel[:times]:
            room.channel.remove(message)
            room.hear(message)
            room.check()

    @precondition(lambda self: any(room.channel for room in self.rooms))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([room for room in self.rooms if room.channel]))
        del room.channel[data.draw(st.integers(0, len(room.channel) - 1))]

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(self.rooms))
        room.fail(data.draw(st.sampled_from([room.sender, room.receiver])))

    @invariant()
    def all_holds(self) -> None:
        for room in self.rooms:
            room.check()


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=examples(150), stateful_step_count=40)
