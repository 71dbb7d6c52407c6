"""One stream of events, any number of readers: the engine says what it decided once, and everybody listens.

With no reader attached the tracer is false, and call sites (`if self.tracer: self.tracer.emit(...)`) build no event at
all. vLLM and SGLang log and export metrics instead; neither records every decision.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from m1_single_request.errors import ConfigError
from m1_single_request.events import Event


@dataclass(frozen=True)
class TraceRecord:
    """An event with its place in time."""

    step: int
    """The engine step it belongs to; 0 before the first."""
    time: float
    """Monotonic seconds."""
    event: Event


class TraceReader(Protocol):
    """Whoever wants to hear the trace."""

    def read(self, record: TraceRecord) -> None:
        """Take one record. An exception detaches the reader with a warning; the engine goes on."""

    def close(self) -> None:
        """No more records will come: write out what is left."""


class Tracer:
    """Stamps events and hands them to its readers."""

    def __init__(self) -> None:
        self.step = 0
        self._readers: list[TraceReader] = []

    def __bool__(self) -> bool:
        return bool(self._readers)

    def attach(self, reader: TraceReader) -> None:
        """Let `reader` hear everything from now on. Raises `ConfigError` if it cannot `read` and `close`."""
        if not all(callable(getattr(reader, name, None)) for name in ("read", "close")):
            raise ConfigError(f"a trace reader needs read(record) and close(); {type(reader).__name__} has not both")
        self._readers.append(reader)

    def detach(self, reader: TraceReader) -> None:
        """Stop handing records to `reader` and close it; nothing happens if it is not attached."""
        for place, attached in enumerate(self._readers):
            if attached is reader:
                del self._readers[place]
                self._guarded(reader, lambda: reader.close())
                return

    def emit(self, event: Event) -> None:
        """Hand `event` to every reader. Never raises: a broken reader must not break the engine."""
        record = TraceRecord(self.step, time.monotonic(), event)
        for reader in tuple(self._readers):
            self._guarded(reader, partial(reader.read, record))

    def close(self) -> None:
        """Detach and close all readers."""
        for reader in tuple(self._readers):
            self.detach(reader)

    def _guarded(self, reader: TraceReader, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if reader in self._readers:
                self._readers.remove(reader)
                with suppress(Exception):  # whatever it still holds, a file perhaps
                    reader.close()
            said = f"trace reader {type(reader).__name__} failed and was detached: {type(error).__name__}: {error}"
            with suppress(Warning):  # warnings may be errors here, and those of a reader are not the engine's
                warnings.warn(said, RuntimeWarning, stacklevel=3)
