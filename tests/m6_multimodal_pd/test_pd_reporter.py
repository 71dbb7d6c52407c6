"""What an engine tells the router of its trace: its words in order, its numbers by name, and how it stands."""

from dataclasses import dataclass
from typing import Any

import pytest

from m1_single_request.trace_event import Event, volatile
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.messages import Told, ToldEvent
from m6_multimodal_pd.disaggregation.reporter import MOST_EVENTS, Reporter, facts_of


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    rid: str = "a"
    number: Any = 3
    is_last: bool = True
    pages: tuple[int, ...] = (1, 2)
    share: float = 0.5
    num_bytes: int = volatile()

    def explain(self) -> str:
        return f"{self.rid} has {self.number}."


def record(step: int, number: Any) -> TraceRecord:
    return TraceRecord(step=step, time=0.0, event=Noticed(number=number, num_bytes=1))


def test_numbers_and_short_words_go_by_name_and_nothing_else() -> None:
    assert facts_of(Noticed(num_bytes=7)) == (("rid", "a"), ("number", 3))


@pytest.mark.parametrize("value", [2**62, -(2**62), "x" * 65, None, 1.5])
def test_what_no_message_may_hold_stays_here(value: Any) -> None:
    assert facts_of(Noticed(number=value, num_bytes=7)) == (("rid", "a"),)


@pytest.mark.parametrize("value", [2**62 - 1, 1 - 2**62, "x" * 64, ""])
def test_the_largest_that_a_message_may_hold_goes(value: Any) -> None:
    assert facts_of(Noticed(number=value, num_bytes=7)) == (("rid", "a"), ("number", value))


def test_a_step_is_told_in_one_message_in_order() -> None:
    sent: list[Any] = []
    reporter = Reporter(sent.append)
    for step, number in ((1, 1), (1, 2), (2, 3)):
        reporter.read(record(step, number))
    assert sent == [Told(1, (told(1), told(2)))], "with the next step"
    reporter.tell()
    reporter.tell()
    assert sent[1:] == [Told(2, (told(3),))]


def test_of_a_step_with_very_much_to_say_the_rest_is_left_out() -> None:
    sent: list[Any] = []
    reporter = Reporter(sent.append)
    for number in range(MOST_EVENTS + 5):
        reporter.read(record(1, number))
    reporter.close()
    assert [len(message.events) for message in sent] == [MOST_EVENTS]


def told(number: int) -> ToldEvent:
    return ToldEvent("noticed", ("a",), f"a has {number}.", (("rid", "a"), ("number", number)))
