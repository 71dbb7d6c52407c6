"""Readers of the trace: the console for people, JSONL for programs, Chrome trace for Perfetto, a list for demos.

A reader receives records and never changes the engine. Attach your own with `engine.tracer.attach(reader)`: any object
with `read(record)` and `close()`. The readers in this file use only the base class `Event`, whose methods return the
text to show, so every milestone can use them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import ConfigError, shown_path
from m1_single_request.trace_event import Event, Phase
from m1_single_request.tracer import TraceReader, TraceRecord
from stepwise_player import page

E = TypeVar("E", bound=Event)
V = TypeVar("V")


class OpenSteps(defaultdict[int, V]):
    """State that a reader keeps for each step that has not ended, by the number of the step."""

    _ended: int | None = None  # the step that ended last, until an event of another one comes
    _next = 0

    def of(self, step: int) -> V:
        """Return what is kept of a step, for an event of it. After its end, return that of the next step to begin."""
        if step == self._ended:
            return self[self._next]
        self._ended = None
        return self[step]

    def end(self, step: int) -> V:
        """Return what is kept of a step, and drop it; also drop that of earlier steps, which will not end any more."""
        kept = self[step]
        for number in [number for number in self if number <= step]:
            del self[number]
        self._ended, self._next = step, max(self, default=step) + 1
        return kept


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
        self._briefs = OpenSteps[dict[str, list[str]]](dict)  # kind of event -> texts of the summary line

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
        line, brief = self._briefs.of(step), event.brief()
        if brief is not None:
            line.setdefault(event.kind, []).append(brief)
        if event.ends_step:
            self._briefs.end(step)
            texts = [text for briefs in line.values() for text in at_most(MOST_BRIEFS, briefs)]
            self.console.print(Text("  ".join([f"step {step:>4}", *texts])))
            self._step = step  # its number is printed, if `verbose` is set now


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
    """Writes one event per line: `{"step": 1, "time": 12.3, "event": "admit", ..., "sentence": "..."}`.

    `stable=True` omits sentences, times and floats computed by the model, so that two machines write the same file.
    """

    def __init__(self, path: str | Path, *, stable: bool = False) -> None:
        self.stable = stable
        self._file = open_for_writing(path)

    def read(self, record: TraceRecord) -> None:
        """Write a line and flush it, so that the trace of a killed run is complete up to that line."""
        self._file.write(line_of(record, stable=self.stable))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_of(record: TraceRecord, *, stable: bool = False) -> str:
    """Return a record as a line of JSON."""
    event = record.event
    stamp = {"step": record.step} if stable else {"step": record.step, "time": record.time}
    sentence = {} if stable else {"sentence": event.explain()}
    line = stamp | {"event": event.kind} | event.data(stable=stable) | sentence
    return json.dumps(line, ensure_ascii=False) + "\n"


class PlayerReader:
    """Writes a page that replays the trace. `close()` writes the file, because the page is one document."""

    def __init__(self, path: str | Path) -> None:
        self._file, self._lines = open_for_writing(path), list[str]()

    def read(self, record: TraceRecord) -> None:
        """Store the line of a record."""
        self._lines.append(line_of(record))

    def close(self) -> None:
        """Write the page and close the file."""
        self._file.write(page([("run", "".join(self._lines).encode(errors="backslashreplace"))]))
        self._file.close()


ENGINE = ("engine", False)  # its lane; a request may have its name
PROCESS = 1  # also the number of the engine's lane: Perfetto takes it for the main thread, and puts lane 0 into it


class ChromeTraceReader:
    """Writes a trace for https://ui.perfetto.dev: a lane of steps per request, a lane of the engine, and counters.

    An event about one request is a mark in that request's lane, any other event a mark in the engine's lane. An event
    may add a bar on a lane of its own. `close()` writes the file, because the format is one JSON document.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_for_writing(path)
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[tuple[str, bool], int] = {ENGINE: PROCESS}  # name, and whether it is a request's -> lane
        self._bars = OpenSteps[list[tuple[str, str]]](list)  # request ids with labels
        self._begun = OpenSteps[float](float)  # begin of a bar on another lane, in microseconds
        self._free = defaultdict[str, float](float)  # end of the last bar of such a lane, which has one at a time
        self._ended = 0.0  # end of the last step

    def read(self, record: TraceRecord) -> None:
        """Convert a record to trace events and store them."""
        event, step, now = record.event, record.step, record.time * 1e6
        bars, rids = event.lanes(), event.request_ids()
        self._bars.of(step).extend(bars)
        if event.begins_bar:
            self._begun[step] = now
        if (bar := event.bar()) is not None and step in self._begun:
            name, duration = bar[0], bar[1] * 1e3
            begin = max(self._begun[step] + min(duration, 0.0), self._free[name])
            begin = min(begin, now - abs(duration))  # it has ended by now
            self._free[name] = begin + abs(duration)
            self._draw((name, False), f"step {step}", step, begin, abs(duration))
        for name, value in event.counters().items():
            self._add(ENGINE, ph="C", name=name, ts=now, args={"": value})
        if event.ends_step:
            self._draw_step(step, event.phases())
        else:
            lane = (rids[0], True) if len(rids) == 1 and not bars else ENGINE
            self._add(lane, ph="i", s="t", name=event.kind, ts=now, args=event.data())

    def close(self) -> None:
        """Write the JSON document and close the file."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": tid, "args": {"name": name}}
            for (name, _), tid in self._lanes.items()
        ]
        json.dump({"traceEvents": names + self._events, "displayTimeUnit": "ms"}, self._file)
        self._file.close()

    def _draw_step(self, step: int, phases: tuple[Phase, ...]) -> None:
        """Draw a step that has ended: its phases, and a bar per request, which begins after the end of the last one."""
        for name, began, ended in phases:
            self._draw(ENGINE, name, step, began * 1e6, (ended - began) * 1e6)
        begin, end = max(phases[0].began * 1e6, self._ended), phases[-1].ended * 1e6
        for rid, label in self._bars.end(step):
            self._draw((rid, True), label, step, begin, end - begin)
        self._begun.end(step)
        self._ended = end

    def _draw(self, lane: tuple[str, bool], name: str, step: int, begin: float, duration: float) -> None:
        self._add(lane, ph="X", name=name, ts=begin, dur=duration, args={"step": step})

    def _add(self, lane: tuple[str, bool], **entry: Any) -> None:
        self._events.append(entry | {"pid": PROCESS, "tid": self._lanes.setdefault(lane, PROCESS + len(self._lanes))})


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
    if config.player is not None:
        readers.append(PlayerReader(config.player))
    return readers
