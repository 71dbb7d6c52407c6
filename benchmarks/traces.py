"""The traced examples of the lessons: what the console shows of a few requests, the same on every machine."""

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from m1_single_request.events import EngineStarted, StepDone
from m1_single_request.output_events import Sampled
from m1_single_request.trace_readers import ConsoleReader, Records
from m1_single_request.tracer import TraceRecord
from m3_paged_attention.events import BackendChosen, ThreadsChanged

MACHINE_DEPENDENT = (BackendChosen, EngineStarted, Sampled, StepDone, ThreadsChanged)
"""Events with times, probabilities or the choice of kernels."""


class Decisions:
    """The verbose console as text, without events of these kinds."""

    def __init__(
        self, width: int = 84, *, hidden: tuple[type, ...] = MACHINE_DEPENDENT, reader: type = ConsoleReader
    ) -> None:
        self._buffer, self.hidden = io.StringIO(), hidden
        self.reader = reader(console=Console(file=self._buffer, width=width, highlight=False))

    def read(self, record: TraceRecord) -> None:
        """Pass on an event that is the same on every machine."""
        if not isinstance(record.event, self.hidden):
            self.reader.read(record)

    def close(self) -> None:
        """Close the console."""
        self.reader.close()

    def text(self) -> str:
        """Return the lines."""
        return "\n".join(line.rstrip() for line in self._buffer.getvalue().strip("\n").splitlines()) + "\n"


def written(run: Callable[[Decisions], object], decisions: Decisions | None = None) -> str:
    """Run an example with a reader of its decisions, and return the text."""
    decisions = decisions or Decisions()
    run(decisions)
    return decisions.text()


def watched(engine: Any, call: Callable[[], object], *kinds: type) -> list[list[Any]]:
    """Run something, and return its events of each of these kinds."""
    records = Records()
    engine.tracer.attach(records)
    try:
        call()
    finally:
        engine.tracer.detach(records)
    return [[event for _, event in records.of(kind)] for kind in kinds]


def phases(steps: Sequence[StepDone]) -> dict[str, float]:
    """Return the median seconds of each phase of these steps."""
    names = ("schedule", "execute", "sample", "update")
    return {name: statistics.median(step.milliseconds(name) for step in steps) / 1e3 for name in names}


def stepped(engine: Any, arrivals: Mapping[int, Sequence[tuple[str, Any, Any]]]) -> Iterator[int]:
    """Run an engine until no request is left, and yield the number of every step after it.

    `arrivals`: by the step before which they come, requests as id, prompt or messages, and parameters.
    """
    step, last = 0, max(arrivals)
    while engine.has_unfinished_requests() or step < last:
        step += 1
        for rid, prompt, params in arrivals.get(step, ()):
            if isinstance(prompt, list) and isinstance(prompt[0], dict):
                prompt = engine.chat_prompt(prompt)
            engine.add_request(prompt, params, request_id=rid)
        engine.step()
        yield step
