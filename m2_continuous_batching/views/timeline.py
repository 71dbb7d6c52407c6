"""Timeline of a run: a lane for each request, a column for each step.

    step   1         11        21
    req-0  P-------------------|
    req-1  P----x-----|
    req-2        ......P-------|

A trace reader, like the console reader: attach it (`engine.tracer.attach(timeline)`), run the engine, and draw it
during the run or afterwards. It shows which requests were in the batch at each step, and which were not.
"""

from dataclasses import dataclass, field

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
"""Letter and colour of each state."""
DONE = ("|", "bold")
RULER = 10  # columns between two numbers of steps


@dataclass
class Lane:
    """Lane of one request: the number of steps before its arrival, then its state in each step until its end."""

    begin: int
    states: list[str] = field(default_factory=list)
    finished: bool = False


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
        for rid, label in event.lanes():  # of any milestone's `Batch`: from m5 on also `verify 3`
            self._now.of(step)[rid] = "prefill" if label == "prefill" else "decode"
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
        room -= room % RULER if room > RULER else 0  # no number is cut
        lines = []
        for begin in [max(0, len(self.steps) - room)] if latest else range(0, len(self.steps), room):
            columns = range(begin, min(begin + room, len(self.steps)))
            numbers = "".join(f"{self.steps[column]:<{RULER}}" for column in columns[::RULER])
            lines.append(Text("step".ljust(labels) + numbers.rstrip(), style="dim"))
            for rid, lane in self.lanes.items():
                states = lane.states[max(0, begin - lane.begin) : max(0, columns.stop - lane.begin)]
                if states or latest:
                    cells = (GLYPHS[state] for state in states)
                    is_end = lane.finished and lane.begin + len(lane.states) in range(begin + 1, columns.stop + 1)
                    before = " " * min(max(0, lane.begin - begin), room)
                    lines.append(Text.assemble(rid.ljust(labels), before, *cells, DONE if is_end else ""))
            lines.append(Text())
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        legend = [*(Text.assemble(glyph, f" {state}") for state, glyph in GLYPHS.items()), Text.assemble(DONE, " done")]
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
