"""An engine's trace on its way to the router: what each step has to say, in one message.

The engine's own readers stay where they are; this one is attached only if somebody listens to the router's trace. What
travels are the event's words, and its numbers by name, so the router need not know the events of whatever the engine is
made of.
"""

from collections.abc import Callable
from contextlib import suppress

from m1_single_request.trace_event import Event
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.runtime.messages import Told, ToldEvent, ToRouter
from m6_multimodal_pd.errors import WireError

MOST_EVENTS = 1000
"""More are not told of one step."""
LONGEST_WORD, LARGEST = 64, 2**62
"""Longer words and larger numbers are not told by name."""


class Reporter:
    """A trace reader that gathers what is said until it is `told`."""

    def __init__(self, send: Callable[[ToRouter], None]) -> None:
        self.send = send
        self._step = 0
        self._events: list[ToldEvent] = []

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if record.step != self._step:
            self.tell()
            self._step = record.step
        if len(self._events) < MOST_EVENTS:
            self._events.append(
                ToldEvent(kind=event.kind[:64], rids=event.request_ids(), said=event.explain(), facts=facts_of(event))
            )

    def tell(self) -> None:
        """Send what was gathered; what is more than a message holds stays untold."""
        if self._events:
            events, self._events = tuple(self._events), []
            with suppress(WireError):
                self.send(Told(self._step, events))

    def close(self) -> None:
        """Send what is left."""
        self.tell()


def facts_of(event: Event) -> tuple[tuple[str, int | str], ...]:
    """The fields that are whole numbers or short words, and the same in every run."""
    return tuple(
        (name, value)
        for name, value in event.data(stable=True).items()
        if (isinstance(value, int) and not isinstance(value, bool) and -LARGEST < value < LARGEST)
        or (isinstance(value, str) and len(value) <= LONGEST_WORD)
    )
