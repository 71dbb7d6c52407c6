"""The timeline of a run: a lane for each request, a column for each step.

    step   1        10        20
    req-0  P-------------------|
    req-1  P----x-----|
    req-2        ......P-------|

It is a reader of the trace, like the console's: attach it (`engine.tracer.attach(timeline)`), run, and `draw` it,
during the run or after it. It shows what continuous batching is about: who was in the batch at which step, and who was
not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

from rich.text import Text

from m1_single_request.events import Event, Finish, RequestAdded, StepDone
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching.events import Batch, LeftOut

E = TypeVar("E", bound=Event)

GLYPHS = {
    "left out": ("x", "bold white on red"),
    "prefill": ("P", "bold white on magenta"),
    "decode": ("-", "black on green"),
    "queued": (".", "yellow"),
}
"""Letter and colour of each state; where several steps share a column, the first of these that occurs is shown."""
DONE = ("|", "bold")
MOST_BLOCKS = 6  # a longer run is not drawn in more lines, but with more steps in each column


@dataclass
class Lane:
    """One request: the steps before it came, then its state in each step until it ended."""

    begin: int
    states: list[str] = field(default_factory=list)
    finished: bool = False

    def state(self, first_step: int, num_steps: int) -> str | None:
        """The most remarkable state in these steps, counted from 0; None where there is none."""
        here = self.states[max(0, first_step - self.begin) : max(0, first_step + num_steps - self.begin)]
        return next((state for state in GLYPHS if state in here), None)


class Timeline:
    """Gathers lanes from the trace, and keeps the records for whoever asks for more (`of`)."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.steps: list[int] = []  # the engine's number of each step that is over
        self.records: list[TraceRecord] = []
        self._now: dict[str, str] = {}  # states in the step that runs
        self._ended: list[str] = []  # requests that end with it

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        self.records.append(record)
        if isinstance(event, RequestAdded):
            self.lanes[event.rid] = Lane(begin=len(self.steps))
        elif isinstance(event, Batch):
            self._now |= dict(event.lanes())
        elif isinstance(event, LeftOut):
            self._now |= dict.fromkeys(event.rids, "left out")
        elif isinstance(event, Finish):
            self._ended.append(event.rid)
        elif isinstance(event, StepDone):
            self._end_step(record.step)

    def close(self) -> None:
        """Nothing is buffered beyond a step."""

    def of(self, kind: type[E]) -> Iterator[tuple[int, E]]:
        """All events of a kind so far, each with its step."""
        return ((record.step, record.event) for record in self.records if isinstance(record.event, kind))

    def draw(self, width: int, *, latest: bool = False) -> Text:
        """The whole timeline in lines of at most `width` characters; or, for a live view, its latest part."""
        labels = max([len("step"), *map(len, self.lanes)]) + 2
        room = max(1, width - labels - 1)  # columns; the one left over is for the mark of an end
        each = 1 if latest else max(1, ceil(len(self.steps) / (room * MOST_BLOCKS)))
        columns = ceil(len(self.steps) / each)
        begins = [max(0, columns - room)] if latest else range(0, columns, room)
        blocks = [self._block(range(begin, min(begin + room, columns)), each, labels, latest) for begin in begins]
        return Text("\n\n", no_wrap=True, overflow="crop").join(blocks)

    def legend(self, width: int) -> Text:
        """What the letters mean, for a timeline of this width."""
        parts = []
        for state, (letter, style) in (*reversed(GLYPHS.items()), ("done", DONE)):
            parts.append(Text.assemble((letter, style), f" {state}"))
        return Text("   ").join(parts)

    def _end_step(self, step: int) -> None:
        self.steps.append(step)
        for request_id, lane in self.lanes.items():
            if not lane.finished:
                waits = "left out" if lane.states and lane.states[-1] != "queued" else "queued"
                lane.states.append(self._now.get(request_id, waits))
        for request_id in self._ended:
            self.lanes[request_id].finished = True
        self._now.clear()
        self._ended.clear()

    def _block(self, columns: range, each: int, labels: int, every_lane: bool) -> Text:
        lines = [Text("step".ljust(labels) + self._ruler(columns, each), style="dim")]
        for request_id, lane in self.lanes.items():
            cells = [lane.state(column * each, each) for column in columns]
            line = Text(request_id.ljust(labels), style="bold")
            for cell in cells:
                line.append(*(GLYPHS[cell] if cell else (" ",)))
            last = (lane.begin + len(lane.states) - 1) // each
            if lane.finished and last in columns:
                line.right_crop(columns[-1] - last)
                line.append(*DONE)
            if every_lane or any(cells):
                lines.append(line)
        return Text("\n").join(lines)

    def _ruler(self, columns: range, each: int) -> str:
        """Step numbers over the columns they begin at: the first, and every tenth."""
        line = ""
        for column in columns:
            number = self.steps[column * each]
            is_tenth = number % 10 == 0 if each == 1 else (column - columns[0]) % 10 == 0
            if column == columns[0] or (is_tenth and len(line) < column - columns[0]):
                line = line.ljust(column - columns[0]) + str(number)
        return line[: len(columns)]
