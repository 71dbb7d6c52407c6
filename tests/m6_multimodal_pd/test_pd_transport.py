"""KV pages come from one engine to another bit by bit, and what is wrong is refused before a byte is written.

Both transports keep the same promises, so most tests run with both.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from m1_single_request.errors import ConfigError, EngineError
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.messages import Ticket
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from m6_multimodal_pd.errors import TransferError
from tests.m6_multimodal_pd.pd_engines import free_frames
from tests.m6_multimodal_pd.transfers import BF16, DRAFT, FP32, MODELS, Memory, Pair, segments_of, sent
from tests.support.amounts import examples

TRANSPORTS = ("in_process", "shared_memory")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    pair = Pair(transport)
    yield pair
    pair.source.close()
    pair.target.close()


# --- pages arrive -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
def test_every_page_arrives_bit_by_bit_and_no_other_page_changes(transport: str, models: list[dict[str, Any]]) -> None:
    pair = Pair(transport, models, checksums=True)
    expected = pair.theirs.pages()
    moves = [([7, 2, 12], [1, 9, 4]), ([1], [3]), ([5, 11, 3, 4], [8, 2, 5, 7])]
    for pages, to in moves:
        pair.move(pages, to)
        for page, other in zip(pages, to, strict=True):
            expected[other] = pair.ours.page(page)
        assert pair.theirs.pages() == expected
    assert pair.ours.pages() == Memory(models, num_pages=12, seed=12).pages(), "the source has changed"


@pytest.mark.gpu
@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
def test_pages_come_from_and_to_a_gpu(models: list[dict[str, Any]]) -> None:
    pair = Pair("shared_memory", models, checksums=True, device="cuda")
    pair.move([7, 2, 12], [1, 9, 4])
    assert [pair.theirs.page(page) for page in (1, 9, 4)] == [pair.ours.page(page) for page in (7, 2, 12)]


@dataclass
class Line:
    """What the test knows of one target."""

    target: StagedTarget
    memory: Memory
    pages: list[bytes]
    underway: dict[int, tuple[Ticket, list[bytes]]] = field(default_factory=dict)
    last: int = -1


class AgainstPlainCopies(RuleBasedStateMachine):
    """Any order of sending, receiving, skipping, releasing and losing: what arrives is what was sent, no frame is in
    two tickets, and none is lost."""

    NUM_FRAMES = 5

    @initialize(transport=st.sampled_from(TRANSPORTS))
    def begin(self, transport: str) -> None:
        self.segments = segments_of(transport)
        self.memory = Memory([DRAFT], num_pages=8, seed=8)
        self.source = StagedSource(self.memory.store, self.segments, num_frames=self.NUM_FRAMES, checksums=True)
        self.lines: dict[str, Line] = {}
        self.noise = random.Random(1)
        self.numbers: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "source"):
            self.source.close()

    @rule(name=st.sampled_from("ab"))
    def meet_or_lose(self, name: str) -> None:
        if name in self.lines:
            gone = self.lines.pop(name)
            self.source.forget(name)
            for number in gone.underway:
                with pytest.raises(TransferError):
                    self.source.release(name, number)
            return
        memory = Memory([DRAFT], num_pages=8, seed=ord(name))
        target = StagedTarget(memory.store, self.segments)
        ticket = sent(self.source, name)
        target.map("p", ticket)
        self.source.release(name, ticket.number)
        self.numbers.add(ticket.number)
        self.lines[name] = Line(target, memory, memory.pages())

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), pages=st.lists(st.integers(1, 8), unique=True, max_size=6))
    def send(self, data: st.DataObject, pages: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.lines)))
        line, free = self.lines[name], self.free(name)
        if len(pages) > self.NUM_FRAMES:
            with pytest.raises(TransferError, match="pages are sent at once, and there are 5 frames: split"):
                self.source.send(name, pages)
            return
        ticket = self.source.send(name, pages)
        if len(pages) > free or not line.underway:
            assert (ticket is None) == (len(pages) > free)
        if ticket is not None:
            assert ticket.number not in self.numbers
            self.numbers.add(ticket.number)
            line.underway[ticket.number] = ticket, [self.memory.page(page) for page in pages]

    @precondition(lambda self: any(line.underway for line in self.lines.values()))
    @rule(data=st.data(), to=st.permutations(range(1, 9)), is_received=st.booleans())
    def receive_and_release(self, data: st.DataObject, to: list[int], is_received: bool) -> None:
        name = data.draw(st.sampled_from([name for name, line in sorted(self.lines.items()) if line.underway]))
        line = self.lines[name]
        number = data.draw(st.sampled_from(sorted(line.underway)))
        ticket, sent = line.underway[number]
        to = to[: len(sent)]
        if is_received and number < line.last:
            with pytest.raises(TransferError, match="late, or twice"):
                line.target.receive("p", ticket, to).write()
        elif is_received:
            line.target.receive("p", ticket, to).write()
            line.last = number
            for page, content in zip(to, sent, strict=True):
                line.pages[page] = content
        self.source.release(name, number)
        del line.underway[number]

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), number=st.integers(-1, 30))
    def release_what_is_not_underway(self, data: st.DataObject, number: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.lines)))
        if number not in self.lines[name].underway:
            with pytest.raises(TransferError, match="not in transit"):
                self.source.release(name, number)

    @rule(page=st.integers(1, 8))
    def compute(self, page: int) -> None:
        """The prefill engine goes on: the page holds something else now."""
        blocks = self.memory.storages[0].blocks
        blocks.view(torch.uint8)[:, page] = self.noise.randrange(256)

    def free(self, name: str) -> int:
        held = sum(len(sent) for _, sent in self.lines[name].underway.values())
        return self.NUM_FRAMES - held

    @invariant()
    def all_is_as_plain_copies_are(self) -> None:
        if not hasattr(self, "source"):
            return
        self.source.check_invariants()
        for name, line in self.lines.items():
            assert free_frames(self.source, name) == self.free(name)
            assert line.memory.pages() == line.pages
            taken = [
                frame
                for ticket, pages in line.underway.values()
                for frame in range(ticket.first_frame, ticket.first_frame + len(pages))
            ]
            assert len(set(taken)) == len(taken) and set(taken) <= set(range(self.NUM_FRAMES))


TestAgainstPlainCopies = AgainstPlainCopies.TestCase
TestAgainstPlainCopies.settings = settings(max_examples=examples(40), stateful_step_count=30)


# --- what is wrong is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [[1, 0], [7, 8, 13], [-1], [2, 3, 2]], ids=str)
def test_pages_that_cannot_be_moved_are_refused_before_any_is_written(transport: str, pages: list[int]) -> None:
    """Page 0 is nobody's. One page more than there are, at the end that has most of them."""
    pair = Pair(transport)
    with pytest.raises(TransferError, match=r"there are no pages|named twice"):
        pair.source.send("d", pages)
    assert free_frames(pair.source, "d") == 4
    ticket, before = sent(pair.source, "d", [1, 2, 3][: len(pages)]), pair.theirs.pages()
    with pytest.raises(TransferError, match=r"there are no pages|named twice"):
        pair.target.receive("p", ticket, pages).write()
    assert pair.theirs.pages() == before
    if len(pages) == 3:  # the frames are used up
        sent(pair.source)
        with pytest.raises(TransferError, match=r"there are no pages|named twice"):
            pair.source.send("d", pages)
    pair.target.receive("p", ticket, [4, 5, 6][: len(pages)]).write()  # it was no trouble to anybody


PLACE, SUMS = "3 pages from frame", "is not what was sent"
TICKETS: dict[str, tuple[Callable[[Ticket], dict[str, Any]], str]] = {
    "a frame too many": (lambda t: {"first_frame": 2}, PLACE),
    "far away": (lambda t: {"first_frame": 2**31 - 1}, PLACE),
    "a checksum less": (lambda t: {"checksums": t.checksums[:-1]}, PLACE),
    "a checksum more": (lambda t: {"checksums": (*t.checksums, 0)}, PLACE),
    "a wrong checksum": (lambda t: {"checksums": (*t.checksums[:-1], t.checksums[-1] ^ 1)}, SUMS),
    "checksums in another order": (lambda t: {"checksums": t.checksums[::-1]}, SUMS),
    "other frames": (lambda t: {"first_frame": 1}, SUMS),
    "a negative number": (lambda t: {"number": -1}, "late, or twice"),
}


@pytest.mark.parametrize("name", TICKETS)
def test_a_ticket_that_makes_no_sense_is_refused_and_nothing_is_written(transport: str, name: str) -> None:
    pair = Pair(transport, checksums=True)
    ticket = pair.source.send("d", [3, 1, 2])
    assert ticket is not None and len(ticket.checksums) == 3
    before, (change, message) = pair.theirs.pages(), TICKETS[name]
    with pytest.raises(TransferError, match=message) as caught:
        pair.target.receive("p", msgspec.structs.replace(ticket, **change(ticket)), [4, 5, 6]).write()
    assert isinstance(caught.value, EngineError) and "\n" not in str(caught.value)
    assert pair.theirs.pages() == before
    if message == SUMS:  # the number is used up
        pair.source.release("d", ticket.number)
        ticket = sent(pair.source, "d", [3, 1, 2])
    pair.target.receive("p", ticket, [4, 5, 6]).write()
    assert pair.theirs.page(4) == pair.ours.page(3)


SEGMENTS: dict[str, dict[str, Any]] = {
    "a frame too many": {"num_frames": 5},
    "more frames than numbers": {"num_frames": 2**31 - 1},
    "an unknown name": {"segment": "stepwise-tests-" + 32 * "0"},
    "no name": {"segment": ""},
    "a long name": {"segment": 10**6 * "a"},
}


@pytest.mark.parametrize("changes", SEGMENTS.values(), ids=SEGMENTS)
def test_a_segment_that_does_not_fit_is_refused_and_the_true_one_works(transport: str, changes: dict[str, Any]) -> None:
    segments = segments_of(transport)
    ours, theirs = Memory(num_pages=5, seed=1), Memory(num_pages=5, seed=2)
    source = StagedSource(ours.store, segments, num_frames=4)
    target = StagedTarget(theirs.store, segments)
    ticket, before = sent(source), theirs.pages()
    for call in (target.map, lambda name, wrong: target.receive(name, wrong, [1])):
        with pytest.raises(TransferError) as caught:
            call("p", msgspec.structs.replace(ticket, **changes))
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert theirs.pages() == before
    target.receive("p", ticket, [2]).write()
    assert theirs.page(2) == ours.page(1)
    source.close()


OTHER_MODELS = {
    "dtype": [FP32 | {"dtype": torch.float16}, DRAFT],
    "dtype of as many bytes": [FP32, DRAFT | {"dtype": torch.float16}],
    "page size": [FP32 | {"block_size": 8}, DRAFT],
    "heads": [FP32 | {"num_kv_heads": 1, "head_dim": 16}, DRAFT],
    "layers": [FP32 | {"num_layers": 4}, DRAFT],
    "no draft": [FP32],
    "draft of as many bytes": [FP32, DRAFT | {"num_kv_heads": 2, "head_dim": 2}],
    "the other way round": [DRAFT, FP32],
    "as many bytes": [BF16 | {"head_dim": 16}, DRAFT],
}


@pytest.mark.parametrize("models", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_the_layout_tells_models_apart(models: list[dict[str, Any]]) -> None:
    """An engine with another layout cannot join (`test_pd_members.py`)."""
    assert Memory(models, num_pages=3, seed=2).store.layout != Memory(num_pages=3, seed=1).store.layout


def test_a_draft_model_needs_as_many_pages_as_the_model() -> None:
    storages = [Memory([model], num_pages=n, seed=0).storages[0] for model, n in ((FP32, 5), (DRAFT, 6))]
    with pytest.raises(ConfigError, match=r"not \[5, 6\]"):
        PageStore(storages)


def test_memory_that_is_not_there_is_an_error_and_holds_no_frame(transport: str) -> None:
    for num_frames in (2**50, 2**63 - 1):  # more than any machine has, in bytes more than a number has bits
        source = StagedSource(Memory(num_pages=3, seed=1).store, segments_of(transport), num_frames=num_frames)
        for _ in range(2):
            with pytest.raises(TransferError, match="cannot be had"):
                source.send("d", [1])
        source.check_invariants()


# --- partners come and go ---------------------------------------------------------------------------------------------


def test_a_source_that_comes_back_has_new_memory(pair: Pair) -> None:
    """Under the same name, before its loss was noticed."""
    old = sent(pair.source)
    again = StagedSource(pair.ours.store, pair.segments, num_frames=4)
    pair.target.receive("p", sent(again), [5]).write()
    assert pair.theirs.page(5) == pair.ours.page(1)
    with pytest.raises(TransferError):
        pair.target.receive("p", old, [6]).write()
    again.close()


def test_a_mapped_segment_can_be_read_after_the_source_is_gone(pair: Pair) -> None:
    """A source that dies between a ticket and its release."""
    ticket = sent(pair.source, "d", [7])
    pair.source.close()
    pair.target.receive("p", ticket, [3]).write()
    assert pair.theirs.page(3) == pair.ours.page(7)


def test_a_closed_end_has_no_segment_and_can_be_closed_again(pair: Pair) -> None:
    ticket = sent(pair.source, "d", [7])
    for _ in range(2):
        pair.source.close(), pair.target.close()
    with pytest.raises(TransferError, match="not in transit"):
        pair.source.release("d", ticket.number)
    with pytest.raises(TransferError):
        pair.target.receive("p", ticket, [1]).write()


def test_in_one_process_a_segment_can_be_mapped_until_a_release_and_a_lost_one_not_at_all() -> None:
    segments = InProcessSegments()
    store = Memory(num_pages=3, seed=1).store
    source = StagedSource(store, segments, num_frames=2)
    tickets = [sent(source, name) for name in "abc"]
    source.release("a", tickets[0].number), source.forget("b")
    for ticket in tickets[:2]:
        with pytest.raises(TransferError, match="there is no segment"):
            StagedTarget(store, segments).map("p", ticket)
    StagedTarget(store, segments).map("p", tickets[2])
    source.close()
