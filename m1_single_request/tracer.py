"""Tracer: one stream of events for any number of readers.

The place where something happens passes a factory and its arguments: `self.tracer.emit(Admit, rid=..., ...)`. Without a
reader no event is built, so tracing costs one call. vLLM and SGLang log and export metrics instead; neither records
every decision.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol

from m1_single_request.errors import LONGEST_REASON, ConfigError, shown
from m1_single_request.trace_event import Event

P = ParamSpec("P")


@dataclass(frozen=True)
class TraceRecord:
    """An event with its place in time."""

    step: int
    """The engine step it belongs to; 0 before the first."""
    time: float
    """Monotonic seconds, of `time.perf_counter`."""
    event: Event


class TraceReader(Protocol):
    """A consumer of the trace: console, file or view."""

    def read(self, record: TraceRecord) -> None:
        """Process one record. An exception detaches the reader with a warning; the engine goes on."""

    def close(self) -> None:
        """Write out what is left; no record comes after this call. A subclass that keeps nothing inherits this."""
        return


class Tracer:
    """Builds events, adds step and time, and passes them to the readers."""

    def __init__(self) -> None:
        self.step = 0
        self.readers: list[TraceReader] = []

    def attach(self, reader: TraceReader) -> None:
        """Pass all later records to `reader`. Raises `ConfigError` if it lacks `read` or `close`."""
        if not all(callable(getattr(reader, name, None)) for name in ("read", "close")):
            raise ConfigError(f"a trace reader needs read(record) and close(); {type(reader).__name__} has not both")
        self.readers.append(reader)

    def detach(self, reader: TraceReader) -> None:
        """Remove `reader` and close it; does nothing if it is not attached."""
        for place, attached in enumerate(self.readers):
            if attached is reader:
                del self.readers[place]
                self._guarded(reader, lambda: reader.close())
                return

    def emit(self, factory: Callable[P, Event | None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Pass the event `factory(*args, **kwargs)` to every reader; None is no event. Does nothing without a reader.

        An error does not reach the caller: of a factory, there is no event; of a reader, it is detached.
        """
        if not self.readers:
            return
        try:
            event = factory(*args, **kwargs)
        except Exception as error:  # a user's tokenizer, for example
            self._warn(f"a trace event could not be built: {shown(error, LONGEST_REASON)}")
            return
        if event is None:
            return
        record = TraceRecord(self.step, time.perf_counter(), event)
        for reader in tuple(self.readers):
            self._guarded(reader, partial(reader.read, record))

    def close(self) -> None:
        """Detach and close all readers."""
        for reader in tuple(self.readers):
            self.detach(reader)

    def _guarded(self, reader: TraceReader, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if reader in self.readers:
                self.readers.remove(reader)
                with suppress(Exception):  # whatever it still holds, a file perhaps
                    reader.close()
            name = type(reader).__name__
            self._warn(f"trace reader {name} failed and was detached: {shown(error, LONGEST_REASON)}")

    def _warn(self, message: str) -> None:
        with suppress(Warning):  # warnings may be errors here, and those of a reader are not the engine's
            warnings.warn(message, RuntimeWarning, stacklevel=4)
