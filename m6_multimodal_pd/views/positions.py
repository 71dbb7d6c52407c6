"""Positions of a prompt with pictures, drawn from the trace alone: time, height and width of each token.

    view = PositionsView()              # a reader of the trace: TraceConfig(readers=(view,))
    console.print(view.draw("req-0"))   # the first picture, the text before it, and what follows

            .  .  .  .  #  #  #  #  .  .  .  .
    place   1  2  3  4  5  6  7  8  9 10 11 12
    time    1  2  3  4  5  5  5  5  7  8  9 10
    height  1  2  3  4  5  5  6  6  7  8  9 10
    width   1  2  3  4  5  6  5  6  7  8  9 10

New in m6: a position was one number before.
"""

from itertools import product

import numpy as np
from rich.text import Text

from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd.events import PositionsAssigned

AROUND = 4
"""Number of tokens of text that are drawn before the first picture, and after the last one."""
MOST_TOKENS = 72
"""Number of tokens that are drawn of a longer prompt."""
KEY = "#: a token of a picture, .: a token of text"


class PositionsView(TraceReader):
    """Keeps the positions of each prompt with pictures."""

    def __init__(self) -> None:
        self.assigned: dict[str, PositionsAssigned] = {}
        """By request id, those of the last prompt; the answers `rid/0`, `rid/1` have one prompt, `rid`."""

    def read(self, record: TraceRecord) -> None:
        """Keep the positions of a prompt."""
        if isinstance(record.event, PositionsAssigned):
            self.assigned[record.event.rid.partition("/")[0]] = record.event

    def draw(self, rid: str, width: int = 80) -> Text:
        """Return the pictures of a prompt and some text around them: a column for each token, in lines of `width`."""
        positions, is_picture = positions_of(self.assigned[rid])
        places = np.arange(len(is_picture))
        first, last = np.flatnonzero(is_picture)[[0, -1]]
        shown = places[max(first - AROUND, 0) : last + 1 + AROUND][:MOST_TOKENS]
        names, marks = ("", "place", "time", "height", "width"), np.where(is_picture, "#", ".")
        cell = len(str(len(places))) + 1
        drawing, room = Text(), (width - len("height ")) // cell
        for line in (shown[start : start + room] for start in range(0, len(shown), room)):
            for name, cells in zip(names, (marks, places, *positions), strict=True):
                drawing.append(f"{name:<6}", "dim")
                for place in line:
                    drawing.append(f"{cells[place]:>{cell}}", "cyan" if is_picture[place] else "")
                drawing.append("\n")
        return drawing


def positions_of(assigned: PositionsAssigned) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all tokens, int64 `[3, num_tokens]`, and whether each is a picture's, `[num_tokens]`."""
    columns: list[tuple[int, ...]] = []
    is_picture = np.zeros(assigned.num_tokens, bool)
    following = 0
    blocks = zip(assigned.starts, assigned.times, assigned.heights, assigned.widths, strict=True)
    for start, (time, _), (top, bottom), (left, right) in blocks:
        columns += [(following + i,) * 3 for i in range(start - len(columns))]
        columns += product([time], range(top, bottom + 1), range(left, right + 1))
        is_picture[start : len(columns)] = True
        following = max(time, bottom, right) + 1
    columns += [(following + i,) * 3 for i in range(assigned.num_tokens - len(columns))]
    return np.array(columns).T, is_picture
