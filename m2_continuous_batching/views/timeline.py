"""Timeline of a run: a lane for each request, a column for each step.

    step   1        10        20
    req-0  P-------------------|
    req-1  P----x-----|
    req-2        ......P-------|

A trace reader, like the console reader: attach it (`engine.tracer.attach(timeline)`), run the engine, and draw it
during the run or afterwards. It shows which requests were in the batch at each step, and which were not.
"""

from dataclasses import dataclass, field
from itertools import groupby
from math import ceil

from rich.console import Group
from rich.text import Text

from m1_single_request.events import RequestAdded
from m1_single_request.output_events import Finish
from m1_single_request.trace_readers import OpenSteps
from m1_single_request.tracer import TraceReader, TraceRecord
from m2_continuous_batching.events import LeftOut

GLYPHS = {
    "left out": ("x", "bold white on red"),
    "prefill": ("P", "bold white on magenta"),
    "decode": ("-", "black on green"),
    "queued": (".", "yellow"),
}
"""Letter and colour of each state. Where several steps share a column, it shows the first of these that occurs."""
DONE = ("|", "bold")
MOST_BLOCKS = 4  # a run that needs more lines of the terminal than this gets several steps in a column


@dataclass
class Lane:
    """Lane of one request: the number of steps before its arrival, then its state in each step until its end."""

    begin: int
    states: list[str] = field(default_factory=list)
    finished: bool = False

    def state(self, step: int, num_steps: int) -> str | None:
        """Return the first of `GLYPHS` that occurs in these steps, counted from 0; None if none does."""
        here = self.states[max(0, step - self.begin) : max(0, step + num_steps - self.begin)]
        return next((state for state in GLYPHS if state in here), None)


class Timeline(TraceReader):
    """Trace reader that builds the lanes."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.steps: list[int] = []  # the engine's number of each completed step
        self._now = OpenSteps[dict[str, str]](dict)  # states in each step that has begun
        self._ended: list[str] = []  # requests that end in the current step

    def read(self, record: TraceRecord) -> None:
        """Add one record."""
        event, step = record.event, record.step
        if isinstance(event, RequestAdded):
            self.lanes[event.rid] = Lane(begin=len(self.steps) + len(self._now))
        for rid, label in event.lanes():  # of any milestone's `Batch`: from m4 on `extend`, from m5 on also `verify 3`
            self._now.of(step)[rid] = "prefill" if label in ("prefill", "extend") else "decode"
        if isinstance(event, LeftOut):
            self._now.of(step).update(dict.fromkeys(event.rids, "left out"))
        elif isinstance(event, Finish):
            self._ended.append(event.rid)
        elif event.ends_step:
            self._end_step(step, self._now.end(step))

    def draw(self, width: int, *, latest: bool = False) -> Group:
        """Return the timeline in lines of at most `width` characters, and a legend.

        A full line continues below, with the lanes that have a state there. `latest`: only the end, for a live view.
        """
        labels = max([len("step"), *map(len, self.lanes)]) + 2
        room = max(1, width - labels - 1)  # columns of a line; one more is for the mark of an end
        each = 1 if latest else max(1, ceil(len(self.steps) / (room * MOST_BLOCKS)))  # steps in a column
        columns = ceil(len(self.steps) / each)
        begins = [max(0, columns - room)] if latest else range(0, columns, room)
        lines = []
        for begin in begins:
            lines += self._block(range(begin, min(begin + room, columns)), each, labels, every_lane=latest)
            lines.append(Text(""))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        legend = [Text.assemble(glyph, f" {state}") for state, glyph in GLYPHS.items()]
        legend.append(Text.assemble(DONE, " done"))
        if each > 1:
            legend.append(Text(f"a column is {each} steps"))
        return Group(*lines, Text("   ").join(legend))

    def _end_step(self, step: int, states: dict[str, str]) -> None:
        for request_id in states:  # a request added before this reader was attached has no lane yet
            self.lanes.setdefault(request_id, Lane(begin=len(self.steps)))
        for request_id, lane in self.lanes.items():
            if lane.finished or lane.begin > len(self.steps):
                continue
            if request_id in states:
                lane.states.append(states[request_id])
            elif request_id not in self._ended:
                lane.states.append("queued")
            lane.finished = request_id in self._ended
        self.steps.append(step)
        self._ended.clear()

    def _block(self, columns: range, each: int, labels: int, *, every_lane: bool) -> list[Text]:
        """Return a ruler and the lanes for some of the columns."""
        lines = [Text("step".ljust(labels) + self._ruler(columns, each), style="dim")]
        for request_id, lane in self.lanes.items():
            last = (lane.begin + len(lane.states) - 1) // each  # its last column
            cells = [lane.state(column * each, each) for column in columns if column <= last]
            line = Text(request_id.ljust(labels))
            for state, same in groupby(cells):
                letter, style = GLYPHS[state] if state else (" ", "")
                line.append(letter * len(list(same)), style)
            if lane.finished and last in columns:
                line.append(*DONE)
            if every_lane or any(cells):
                lines.append(line)
        return lines

    def _ruler(self, columns: range, each: int) -> str:
        """Return the step numbers above the first column of a line and above every tenth column."""
        ruler = ""
        for place, column in enumerate(columns):
            number = str(self.steps[column * each])
            is_round = (column if each > 1 else column + 1) % 10 == 0
            if place == 0 or (is_round and len(ruler) < place and place + len(number) <= len(columns)):
                ruler = ruler.ljust(place) + number
        return ruler
