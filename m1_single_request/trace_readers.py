"""Readers of the trace: the console for people, JSONL for programs, Chrome trace for Perfetto, a list for demos.

A reader receives records and never changes the engine. Attach your own with `engine.tracer.attach(reader)`: any object
with `read(record)` and `close()`. The readers in this file use only the base class `Event`, whose methods return the
text to show, so every milestone can use them.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import ConfigError, shown_path
from m1_single_request.trace_event import Event
from m1_single_request.tracer import TraceReader, TraceRecord

E = TypeVar("E", bound=Event)


class TraceConsole(Console):
    """A console that does not end the program when its output is closed (`| head`): the tracer detaches its reader."""

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError` in the reader, so that the tracer detaches it."""
        raise BrokenPipeError("the console's output was closed")


MOST_BRIEFS = 4  # events of one kind that a summary line lists; it counts the others


class ConsoleReader(TraceReader):
    """Prints the trace: with `verbose` every decision in a sentence, otherwise one line per step."""

    def __init__(self, *, verbose: bool = True, console: Console | None = None) -> None:
        self.verbose = verbose
        self.console = console or TraceConsole(highlight=False)
        self._step = 0
        self._briefs: dict[str, list[str]] = {}  # kind of event -> texts of the next summary line
        self._line = 0  # the step of that line

    def read(self, record: TraceRecord) -> None:
        """Print a record, or store it for the step's summary line."""
        if self.verbose:
            self._print_event(record)
        elif record.event.headline:
            self.console.print(Text(record.event.explain(), style=record.event.style))
        else:
            self._summarise(record.event, record.step)

    def _print_event(self, record: TraceRecord) -> None:
        event = record.event
        if record.step != self._step:
            self._step = record.step
            self.console.print(Text(f"\nstep {record.step}", style="bold"))
        indent = 0 if event.headline else 4 if event.detail else 2
        self.console.print(Padding(Text(event.explain(), style=event.style), (0, 0, 0, indent)))

    def _summarise(self, event: Event, step: int) -> None:
        if step > self._line:
            self._line = step
            self._briefs.clear()  # from a step that did not end
        brief = event.brief()
        if brief is not None:
            self._briefs.setdefault(event.kind, []).append(brief)
        if event.ends_step:
            texts = [text for briefs in self._briefs.values() for text in at_most(MOST_BRIEFS, briefs)]
            self.console.print(Text("  ".join([f"step {step:>4}", *texts])))
            self._step = step  # its number is printed, if `verbose` is set now
            self._line = step + 1  # events before the next step begins are part of that step's line
            self._briefs.clear()


def at_most(limit: int, texts: list[str]) -> list[str]:
    """Return the first `limit` texts, then one text with the number of the others."""
    return texts if len(texts) <= limit else [*texts[:limit], f"and {len(texts) - limit} more"]


class Records(list[TraceRecord], TraceReader):
    """Stores all records."""

    def read(self, record: TraceRecord) -> None:
        """Append a record."""
        self.append(record)

    def of(self, kind: type[E]) -> list[tuple[int, E]]:
        """Return all events of a kind so far, each with its step."""
        return [(record.step, record.event) for record in self if isinstance(record.event, kind)]


class JsonlReader:
    """Writes one event per line: `{"step": 1, "time": 12.3, "event": "admit", ...}`.

    `stable=True` omits times and floats computed by the model, so that two machines write the same file.
    """

    def __init__(self, path: str | Path, *, stable: bool = False) -> None:
        self.stable = stable
        self._file = open_for_writing(path)

    def read(self, record: TraceRecord) -> None:
        """Write a line and flush it, so that the trace of a killed run is complete up to that line."""
        stamp = {"step": record.step} if self.stable else {"step": record.step, "time": record.time}
        line = stamp | {"event": record.event.kind} | record.event.data(stable=self.stable)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ChromeTraceReader:
    """Writes a trace for https://ui.perfetto.dev: a lane of steps per request, a lane of the engine, and counters.

    An event about one request is a mark in that request's lane, any other event a mark in the engine's lane. `close()`
    writes the file, because the format is one JSON document.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_for_writing(path)
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str | None, int] = {None: 0}  # request id -> lane; None: the engine's lane
        self._step = 0
        self._bars: list[tuple[str, str]] = []

    def read(self, record: TraceRecord) -> None:
        """Convert a record to trace events and store them."""
        event, now = record.event, record.time * 1e6
        if record.step != self._step:
            self._step = record.step
            self._bars.clear()
        bars, rids = event.lanes(), event.request_ids()
        self._bars += bars
        for name, value in event.counters().items():
            self._add(None, ph="C", name=name, ts=now, args={name: value})
        if event.ends_step:
            self._draw_step(event.phases(), now)
        else:
            lane = rids[0] if len(rids) == 1 and not bars else None
            self._add(lane, ph="i", s="t", name=event.kind, ts=now, args=event.data())

    def close(self) -> None:
        """Write the JSON document and close the file."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane or "engine"}}
            for lane, tid in self._lanes.items()
        ]
        json.dump({"traceEvents": names + self._events, "displayTimeUnit": "ms"}, self._file)
        self._file.close()

    def _draw_step(self, phases: dict[str, float], now: float) -> None:
        """Draw the step that ends at `now` (microseconds): one bar per request, and its phases one after the other."""
        whole, args = sum(phases.values()) * 1e3, {"step": self._step}
        begin = now - whole
        for rid, label in self._bars:
            self._add(rid, ph="X", name=label, ts=begin, dur=whole, args=args)
        for phase, duration in phases.items():
            self._add(None, ph="X", name=phase, ts=begin, dur=duration * 1e3, args=args)
            begin += duration * 1e3

    def _add(self, lane: str | None, **entry: Any) -> None:
        self._events.append(entry | {"pid": 1, "tid": self._lanes.setdefault(lane, len(self._lanes))})


def open_for_writing(path: str | Path) -> Any:
    """Open a trace file for writing. Raises `ConfigError` with the reason if that fails."""
    try:
        return open(path, "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the trace file {shown_path(path)} cannot be written: {why}") from error


def readers_of(config: TraceConfig) -> list[TraceReader]:
    """Return the readers that a `TraceConfig` configures."""
    readers: list[TraceReader] = list(config.readers)
    if config.console != "off":
        readers.append(ConsoleReader(verbose=config.console == "verbose"))
    if config.jsonl is not None:
        readers.append(JsonlReader(config.jsonl))
    if config.chrome is not None:
        readers.append(ChromeTraceReader(config.chrome))
    return readers
