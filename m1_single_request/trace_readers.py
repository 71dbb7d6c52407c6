"""Readers of the trace: the console for people, JSONL for programs, Chrome trace for Perfetto.

A reader only listens. Attach your own with `engine.tracer.attach(reader)`: anything with `read(record)` and `close()`.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import ConfigError
from m1_single_request.events import Batch, EngineStarted, Event, Finish, Result, StepDone, some
from m1_single_request.tracer import TraceReader, TraceRecord


class TraceConsole(Console):
    """A console that does not end the program when its output is closed (`| head`): the tracer detaches its reader."""

    def on_broken_pipe(self) -> None:
        """Let the reader fail, which is what the tracer expects."""
        raise BrokenPipeError("the console's output was closed")


class ConsoleReader:
    """Prints the trace: `verbose` says every decision in sentences, `summary` one line per step."""

    def __init__(self, *, verbose: bool = True, console: Console | None = None) -> None:
        self.verbose = verbose
        self.console = console or TraceConsole(highlight=False)
        self._step = 0
        self._line: list[str] = []
        self._texts: dict[str, str] = {}  # by request: its text so far

    def read(self, record: TraceRecord) -> None:
        """Print a record, or keep it for the step's line."""
        event = record.event
        new = event.text[len(self._texts.get(event.rid, "")) :] if isinstance(event, Result) else ""
        if self.verbose:
            self._say(record)
        else:
            self._summarise(event, record.step, new)
        if isinstance(event, Result):
            self._texts[event.rid] = event.text
        elif isinstance(event, Finish):
            self._texts.pop(event.rid, None)

    def close(self) -> None:
        """Nothing is buffered beyond a step."""

    def _say(self, record: TraceRecord) -> None:
        if record.step != self._step:
            self._step = record.step
            self.console.print(Text(f"\nstep {record.step}", style="bold"))
        indent = 0 if isinstance(record.event, EngineStarted) else 4 if record.event.detail else 2
        line = Text(record.event.explain(), style=record.event.style)
        self.console.print(Padding(line, (0, 0, 0, indent)))

    def _summarise(self, event: Event, step: int, new_text: str) -> None:
        if isinstance(event, EngineStarted):
            self.console.print(Text(event.explain(), style=event.style))
        elif isinstance(event, Batch):
            self._line = [f"{event.mode:<7} {some(sum(event.extend_lens), 'token')}  {', '.join(event.rids)}"]
        elif isinstance(event, Result):
            self._line.append(f"output {event.out_len:>3} {new_text!r}")
        elif isinstance(event, Finish):
            self._line.append(f"{event.rid} ends: {event.reason}")
        elif isinstance(event, StepDone):
            waiting = f"{event.num_waiting} waiting, " if event.num_waiting else ""
            state = f"KV {some(event.kv_tokens, 'token')}, {waiting}{event.total_ms:.1f} ms"
            self.console.print(Text(f"step {step:>4}  " + "  ".join([*self._line, state])))
            self._line = []


class JsonlReader:
    """Writes one event a line: `{"step": 1, "time": 12.3, "event": "admit", ...}`.

    `stable=True` leaves out times and floats computed by the model, so that two machines write the same file.
    """

    def __init__(self, path: str | Path, *, stable: bool = False) -> None:
        self.stable = stable
        self._file = open_for_writing(path)

    def read(self, record: TraceRecord) -> None:
        """Write a line; it is in the file at once, so that a killed run leaves its trace behind."""
        stamp = {"step": record.step} if self.stable else {"step": record.step, "time": record.time}
        line = stamp | {"event": record.event.kind} | record.event.data(stable=self.stable)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ChromeTraceReader:
    """Writes a trace for https://ui.perfetto.dev: a lane per request, the engine's steps, counters.

    The file is written by `close()`: the format is one JSON document.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_for_writing(path)
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {"engine": 0}
        self._batch: Batch | None = None

    def read(self, record: TraceRecord) -> None:
        """Keep a record as trace events."""
        event, now = record.event, record.time * 1e6
        if isinstance(event, Batch):
            self._batch = event
        elif isinstance(event, StepDone):
            self._step(record.step, event, now)
        rids = getattr(event, "rids", ()) or filter(None, [getattr(event, "rid", getattr(event, "owner", None))])
        for rid in rids:
            self._add(ph="i", s="t", name=event.kind, ts=now, lane=rid, args=event.data())

    def close(self) -> None:
        """Write the document."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
            for lane, tid in self._lanes.items()
        ]
        json.dump({"traceEvents": names + self._events, "displayTimeUnit": "ms"}, self._file)
        self._file.close()

    def _step(self, step: int, event: StepDone, now: float) -> None:
        mode = self._batch.mode if self._batch else "idle"
        begin = now - event.total_ms * 1e3
        for rid in self._batch.rids if self._batch else ():
            self._add(ph="X", name=mode, ts=begin, dur=event.total_ms * 1e3, lane=rid, args={"step": step})
        for phase in ("schedule", "execute", "sample", "update"):
            duration = getattr(event, f"{phase}_ms") * 1e3
            self._add(ph="X", name=phase, ts=begin, dur=duration, lane="engine", args={"step": step})
            begin += duration
        counters = {"batched tokens": event.num_tokens, "KV tokens": event.kv_tokens, "running": event.num_running}
        for name, value in counters.items():
            self._add(ph="C", name=name, ts=now, lane="engine", args={name: value})
        self._batch = None

    def _add(self, *, lane: str, **entry: Any) -> None:
        self._events.append(entry | {"pid": 1, "tid": self._lanes.setdefault(lane, len(self._lanes))})


def open_for_writing(path: str | Path) -> Any:
    """Open a trace file, or say clearly why not (`ConfigError`)."""
    try:
        return open(path, "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trace file {str(path)!r} cannot be written: {error}") from error


def readers_of(config: TraceConfig) -> list[TraceReader]:
    """The readers that a `TraceConfig` asks for."""
    readers: list[TraceReader] = list(config.readers)
    if config.console != "off":
        readers.append(ConsoleReader(verbose=config.console == "verbose"))
    if config.jsonl is not None:
        readers.append(JsonlReader(config.jsonl))
    if config.chrome is not None:
        readers.append(ChromeTraceReader(config.chrome))
    return readers
