"""What an engine tells the router of its trace: its words in order, its numbers by name, and how it stands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from m1_single_request.errors import EngineDeadError
from m1_single_request.trace_event import Event, volatile
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.runtime.messages import Chunk, Joined, Relay, ReportedEvent, StepEvents
from m6_multimodal_pd.disaggregation.runtime.reporter import MOST_EVENTS, MOST_VALUES, Reporter, facts_of
from m6_multimodal_pd.errors import WireError
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import Group
from tests.m6_multimodal_pd.seeing import asking


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    rid: str = "a"
    number: Any = 3
    is_last: bool = True
    pages: tuple[Any, ...] = (1, 2)
    share: float = 0.5
    num_bytes: int = volatile()

    def explain(self) -> str:
        return f"{self.rid} has {self.number}."


def record(step: int, number: Any) -> TraceRecord:
    return TraceRecord(step=step, time=0.0, event=Noticed(number=number, num_bytes=1))


LARGEST = (2**62 - 1, 1 - 2**62, "x" * 64, "")
TOO_LARGE = (2**62, -(2**62), "x" * 65, None, 1.5)


@pytest.mark.parametrize("value", [*LARGEST, *TOO_LARGE])
def test_numbers_and_short_words_that_a_message_may_hold_go_by_name_alone_and_in_tuples(value: Any) -> None:
    facts = (("rid", "a"), ("number", value), ("pages", (1, value))) if value in LARGEST else (("rid", "a"),)
    assert facts_of(Noticed(number=value, pages=(1, value), num_bytes=7)) == facts


def test_a_tuple_of_very_many_numbers_is_left_out() -> None:
    assert [name for name, _ in facts_of(Noticed(pages=(1,) * MOST_VALUES, num_bytes=7))] == ["rid", "number", "pages"]
    assert [name for name, _ in facts_of(Noticed(pages=(1,) * (MOST_VALUES + 1), num_bytes=7))] == ["rid", "number"]


def test_a_step_is_told_in_one_message_in_order() -> None:
    sent: list[Any] = []
    reporter = Reporter(sent.append)
    for step, number in ((1, 1), (1, 2), (2, 3)):
        reporter.read(record(step, number))
    assert sent == [StepEvents(1, (told(1), told(2)))], "with the next step"
    reporter.flush()
    reporter.flush()
    assert sent[1:] == [StepEvents(2, (told(3),))]


def test_of_a_step_with_very_much_to_say_the_rest_is_left_out() -> None:
    sent: list[Any] = []
    reporter = Reporter(sent.append)
    for number in range(MOST_EVENTS + 5):
        reporter.read(record(1, number))
    reporter.close()
    assert [len(message.events) for message in sent] == [MOST_EVENTS]


def test_words_that_no_message_holds_are_left_out_and_the_engine_goes_on() -> None:
    sent: list[Any] = []

    def send(message: Any) -> None:
        if told(2) in message.events:
            raise WireError("a message of 9 bytes; 8 are the limit")
        sent.append(message)

    reporter = Reporter(send)
    for number in (1, 2, 3):
        reporter.read(record(number, number))
    reporter.close()
    assert sent == [StepEvents(1, (told(1),)), StepEvents(3, (told(3),))]


def told(number: int) -> ReportedEvent:
    return ReportedEvent("noticed", ("a",), f"a has {number}.", (("rid", "a"), ("number", number), ("pages", (1, 2))))


def test_the_events_that_led_to_a_message_are_sent_before_it(seeing_directory: Path) -> None:
    """So whoever hears the router hears of causes before effects, whichever engine is faster."""
    with Group(seeing_directory, is_traced=True) as group:
        group.run({"a": (asking("a", 1), greedy(4), {}), "b": (asking(2, 3), greedy(4), {})})
        heard = group.wire.heard
        own = [message for name, message in heard if name == "prefill-0" and not isinstance(message, Joined)]
        sent = [i for i, message in enumerate(own) if isinstance(message, Relay) and isinstance(message.body, Chunk)]
        assert len(sent) >= 2
        for place in sent:
            before = own[place - 1]
            assert isinstance(before, StepEvents) and before.events[-1].kind == "chunk_sent"
            facts = dict(before.events[-1].facts)
            assert (facts["room"], facts["number"]) == (own[place].body.room, own[place].body.number)


def test_the_events_of_a_step_are_sent_before_a_copy_finds_the_device_lost(seeing_directory: Path) -> None:
    with Group(seeing_directory, is_traced=True) as group:
        engine = group.engines["prefill-0"]

        def after_step() -> None:
            if engine.core.iteration:
                raise EngineDeadError("KV cannot be copied any more")

        engine.side.after_step = after_step  # type: ignore[method-assign]
        group.run({"a": (asking(2, 3), greedy(4), {})})
        of_engine = [each for name, each in group.wire.heard if name == "prefill-0" and isinstance(each, StepEvents)]
        assert "prefill-0" not in group.engines
        assert of_engine[-1].step == 1 and of_engine[-1].events[-1].kind == "step_done"


def test_without_a_reader_nothing_is_told(seeing_directory: Path) -> None:
    with Group(seeing_directory) as group:
        group.run({"a": (asking(2, 3), greedy(4), {})})
        assert not [message for _, message in group.wire.heard if isinstance(message, StepEvents)]
