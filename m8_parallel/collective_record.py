"""A record of this rank's collectives: those since the last look, for the trace, and totals for `stats`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Collective(NamedTuple):
    """A collective of this rank."""

    kind: str
    num_bytes: int
    """Size of this rank's tensor."""
    began: float
    """By `time.perf_counter`."""
    seconds: float


class CollectiveRecord:
    """The collectives of a rank."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []
        """Since the last look of `taken`."""
        self.num_collectives, self.num_bytes, self.seconds = 0, 0, 0.0
        """Of all collectives."""

    def add(self, call: Collective) -> None:
        """Count a collective."""
        self.calls.append(call)
        self.num_collectives += 1
        self.num_bytes += call.num_bytes
        self.seconds += call.seconds

    def replayed(self, calls: Sequence[Collective]) -> None:
        """Count collectives that a CUDA graph has made once more: only the device knows how long they take."""
        now = time.perf_counter()
        for call in calls:
            self.add(call._replace(began=now, seconds=0.0))

    def taken(self) -> tuple[Collective, ...]:
        """Return the collectives since the last look."""
        calls, self.calls = tuple(self.calls), []
        return calls

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In the block collectives are no part of a step, and not counted."""
        totals, number = (self.num_collectives, self.num_bytes, self.seconds), len(self.calls)
        try:
            yield
        finally:
            del self.calls[number:]
            self.num_collectives, self.num_bytes, self.seconds = totals
