"""The two ends of a transfer: each alone by example, and both over a channel that loses, doubles and mixes up messages.

The machine at the end plays what two engines do with their ends (`prefill_side.py`, `decode_side.py`): the messages are
theirs, and what a message changes, and which message follows, is theirs, too. Only the pages are numbers.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
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

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = KVPoll
PAGE_SIZE = 4
PAGES = 3
TOKENS = 10
"""Two full pages and a half."""


@dataclass
class Changes:
    """The transitions of one end, as it tells of them."""

    told: list[tuple[KVPoll, KVPoll]] = field(default_factory=list)

    def __call__(self, before: KVPoll, after: KVPoll, why: str) -> None:
        assert why
        self.told.append((before, after))


def sender(state: KVPoll = BOOTSTRAPPING, *, num_tokens: int = TOKENS, start: int = 0) -> KVSender:
    """A sender in this state, on the way that leads there."""
    end = KVSender(7, num_tokens=num_tokens, page_size=PAGE_SIZE, on_change=Changes())
    if state in (WAITING, TRANSFERRING, SUCCESS):
        assert end.preallocated(start)
    if state in (TRANSFERRING, SUCCESS):
        end.sent(range(1))
    if state is SUCCESS:
        end.sent(range(1, PAGES))
        end.has_sent_first_token = True
        assert end.received()
    if state is FAILED:
        assert end.fail("a test")
    assert end.state is state
    return end


def receiver(state: KVPoll = BOOTSTRAPPING, *, num_tokens: int = TOKENS, start: int = 0) -> KVReceiver:
    """A receiver in this state, on the way that leads there."""
    end = KVReceiver(7, num_tokens=num_tokens, page_size=PAGE_SIZE, on_change=Changes())
    if state in (WAITING, TRANSFERRING, SUCCESS):
        assert end.preallocated(start)
    if state in (TRANSFERRING, SUCCESS):
        take(end, 0, range(1))
    if state is SUCCESS:
        take(end, 1, range(1, PAGES))
        assert end.first_token_arrived(2) and end.complete()
    if state is FAILED:
        assert end.fail("a test")
    assert end.state is state
    return end


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


def refused(end: Transfer, verb: Callable[[], object]) -> str:
    """The words of a refusal, which has changed nothing."""
    before = known(end)
    with pytest.raises(TransferError) as caught:
        verb()
    assert known(end) == before
    assert f"room {end.room}" in str(caught.value)
    return str(caught.value)


def unchanged(end: Transfer, verb: Callable[[], object]) -> None:
    """It has no effect, and says so."""
    before = known(end)
    assert verb() is False
    assert known(end) == before


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [FAILED, SUCCESS])
def test_nothing_that_comes_late_changes_a_final_state(state: KVPoll) -> None:
    p, d = sender(state), receiver(state)
    unchanged(p, lambda: p.fail("again"))
    unchanged(d, lambda: d.fail("again"))
    unchanged(p, lambda: p.preallocated(0))
    unchanged(p, p.received)
    p.has_sent_first_token = True
    unchanged(p, p.received)
    unchanged(d, lambda: d.preallocated(0))
    unchanged(d, lambda: d.expects(0, range(1)))
    unchanged(d, lambda: d.expects(d.num_chunks, range(d.next_page, PAGES)))
    unchanged(d, lambda: d.expects(99, range(5, 99)))
    unchanged(d, lambda: d.first_token_arrived(2))
    unchanged(d, lambda: d.first_token_arrived(99))
    unchanged(d, d.complete)


@pytest.mark.parametrize("start", [-PAGE_SIZE, 1, PAGE_SIZE + 1, TOKENS, 3 * PAGE_SIZE, 2**31 - 1])
@pytest.mark.parametrize("make", [sender, receiver])
def test_a_start_that_is_no_whole_page_of_the_prompt_is_refused(make: Any, start: int) -> None:
    end = make()
    assert "no whole pages" in refused(end, lambda: end.preallocated(start))
    assert end.preallocated(0), "another one is taken"


# --- the sender -------------------------------------------------------------------------------------------------------


def pages_of(end: KVSender, num_computed: int, at_most: int = 99) -> list[int]:
    return list(end.pages_ready(num_computed, at_most=at_most))


def test_pages_are_ready_when_they_are_full_and_the_last_with_the_last_token() -> None:
    end = sender(WAITING)
    ready = {n: pages_of(end, n) for n in range(TOKENS + 1)}
    assert [len(ready[n]) for n in ready] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    assert ready[8] == [0, 1] and ready[TOKENS] == [0, 1, 2]


def test_less_kv_than_before_makes_no_page_ready() -> None:
    """A request that lost its place is computed again from the start."""
    end = sender(WAITING)
    end.sent(range(2))
    assert [pages_of(end, n) for n in (0, 4, 8)] == [[], [], []]


@pytest.mark.parametrize("state", [BOOTSTRAPPING, WAITING, TRANSFERRING])
def test_a_sender_that_has_not_told_all_is_not_done(state: KVPoll) -> None:
    end = sender(state)
    unchanged(end, end.received)


# --- the receiver -----------------------------------------------------------------------------------------------------


def test_the_first_token_counts_once() -> None:
    end = receiver(WAITING)
    assert end.first_token_arrived(3)
    unchanged(end, lambda: end.first_token_arrived(3))
    unchanged(end, lambda: end.first_token_arrived(2))


def test_neither_a_chunk_nor_a_first_token_comes_before_there_is_room() -> None:
    end = receiver()
    assert "expected was chunk 0 from page 0 on, of 3" in refused(end, lambda: end.expects(0, range(1)))
    refused(end, lambda: end.first_token_arrived(1))
    unchanged(end, end.complete)


@pytest.mark.parametrize(
    ("start", "number", "pages"),
    [
        *((0, 1, range(1, 2)), (0, 1, range(2, 3)), (0, 2, range(1)), (0, 0, range(1, 2))),
        *((0, 0, range(0, 0)), (0, 0, range(4)), (0, 99, range(99)), (8, 0, range(3)), (8, 0, range(1, 3))),
    ],
    ids="skips-one leaves-a-hole starts-late begins-late empty too-long absurd cached half-cached".split(),
)
def test_a_chunk_out_of_turn_or_with_pages_not_its_own_is_refused(start: int, number: int, pages: range) -> None:
    end = receiver(WAITING, start=start)
    expected = f"expected was chunk 0 from page {start // PAGE_SIZE} on, of 3"
    assert expected in refused(end, lambda: end.expects(number, pages))
    assert take(end, 0, range(start // PAGE_SIZE, PAGES)), "the right one is taken"


def could_be_complete(end: KVReceiver) -> bool:
    """Whether chunks that may still come make it complete."""
    if end.announced is None:
        return True
    pages, chunks = end.end_page - end.next_page, end.announced - end.num_chunks
    return min(pages, 1) <= chunks <= pages


SMALL = st.integers(0, 5)
CLAIMS = st.one_of(
    st.tuples(st.just("chunk"), SMALL, SMALL, SMALL),
    st.tuples(st.just("next"), st.integers(0, 3)),
    st.tuples(st.just("told"), SMALL),
    st.tuples(st.just("room"), st.integers(-1, 5)),
)


@given(num_tokens=st.integers(1, 20), start=st.integers(0, 4), claims=st.lists(CLAIMS, max_size=20))
def test_a_receiver_takes_each_page_once_or_refuses(num_tokens: int, start: int, claims: list[Any]) -> None:
    end = receiver(num_tokens=num_tokens)
    start = min(start, num_tokens // PAGE_SIZE) * PAGE_SIZE
    end.preallocated(start)
    taken: list[int] = []
    for claim in claims:
        before = known(end)
        try:
            match claim:
                case "chunk", number, first, count:
                    if take(end, number, range(first, first + count)):
                        taken += range(first, first + count)
                case "next", count:
                    pages = range(end.next_page, end.next_page + count)
                    if take(end, end.num_chunks, pages):
                        taken += pages
                case "told", count:
                    end.first_token_arrived(count)
                case "room", pages_cached:
                    end.preallocated(pages_cached * PAGE_SIZE)
        except TransferError:
            assert known(end) == before
        end.complete()
        assert taken == list(range(start // PAGE_SIZE, end.next_page)), "each once, and in order"
        assert (end.state is SUCCESS) == (end.num_chunks == end.announced), "then, and not before"
        assert end.state is not SUCCESS or end.next_page == end.end_page
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
        self.num_refusals = 0

    @property
    def is_over(self) -> bool:
        return self.sender.state.is_final and self.receiver.state.is_final

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
            self.num_refusals += 1
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


@given(
    num_tokens=st.integers(1, 40),
    page_size=PAGE_SIZES,
    cached=st.integers(0, 40),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    at_most=st.integers(1, 5),
    turns=st.lists(st.sampled_from(["compute", "send", "hear", "again"]), max_size=60),
    again=st.lists(st.integers(0, 200), max_size=20),
)
def test_if_all_arrives_in_order_both_ends_succeed_whatever_comes_again(
    num_tokens: int, page_size: int, cached: int, pieces: list[int], at_most: int, turns: list[str], again: list[int]
) -> None:
    num_cached = min(cached, num_tokens) // page_size * page_size
    room = Room(0, num_tokens=num_tokens, page_size=page_size, num_cached=num_cached)
    room.take_room()
    heard: list[PeerMessage] = []
    older, sizes = deque(again), deque(pieces)
    num_pages = -(-num_tokens // page_size) - num_cached // page_size
    most_steps = num_tokens + 2 * num_pages + 3
    fair = ["compute", "send", "hear"] * most_steps
    for turn in [*turns, *fair]:
        match turn:
            case "compute":
                sizes.rotate()
                room.compute(sizes[0])
            case "send":
                room.send(at_most)
            case "hear" if room.channel:
                heard.append(room.channel.pop(0))
                room.hear(heard[-1])
            case "again" if heard and older:
                room.hear(heard[older.popleft() % len(heard)])
        room.check()
    assert (room.sender.state, room.receiver.state) == (SUCCESS, SUCCESS)
    assert not room.channel and not room.num_refusals
    for message in heard:
        room.hear(message)
        room.check()
    assert len(room.taken) == num_pages
