"""Trace reader of an engine that sends the events of each step to the router, in one message.

It is attached only if the router's trace has a reader. A message has the sentence of each event and its numbers by
name, so the router needs no classes for the events of an engine's parts.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from m1_single_request.trace_event import Event
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.runtime.messages import Fact, ReportedEvent, StepEvents, ToRouter
from m6_multimodal_pd.errors import WireError

MOST_EVENTS = 1000
"""Maximum number of events that are sent of one step."""
LONGEST_WORD, LARGEST, MOST_VALUES = 64, 2**62, 20_000
"""Fields with longer words, larger numbers or more of them are not sent. A step has a number for each expert of each
layer: 12,032 in the largest released model."""


class Reporter:
    """Collects events until `flush` sends them."""

    def __init__(self, send: Callable[[ToRouter], None]) -> None:
        self._send = send
        self._step = 0
        self._events: list[ReportedEvent] = []

    def read(self, record: TraceRecord) -> None:
        """Collect the event of one record; send those of the step before."""
        event = record.event
        if record.step != self._step:
            self.flush()
            self._step = record.step
        if len(self._events) < MOST_EVENTS:
            self._events.append(
                ReportedEvent(
                    kind=event.kind[:64], rids=event.request_ids(), text=event.explain(), facts=facts_of(event)
                )
            )

    def flush(self) -> None:
        """Send the collected events; drop them if they are too large for a message."""
        if self._events:
            events, self._events = tuple(self._events), []
            with suppress(WireError):
                self._send(StepEvents(self._step, events))

    def send(self, message: ToRouter) -> None:
        """Send the events that led to a message, and then the message."""
        self.flush()
        self._send(message)

    def close(self) -> None:
        """Send the last events."""
        self.flush()


def facts_of(event: Event) -> tuple[tuple[str, Fact], ...]:
    """Return the fields that a message may hold, and that are the same in every run."""
    values = {name: value if type(value) is tuple else (value,) for name, value in event.data(stable=True).items()}
    sent = {name for name, each in values.items() if len(each) <= MOST_VALUES and all(map(_is_short, each))}
    return tuple((name, getattr(event, name)) for name in values if name in sent)


def _is_short(value: Any) -> bool:
    return abs(value) < LARGEST if type(value) is int else isinstance(value, str) and len(value) <= LONGEST_WORD
