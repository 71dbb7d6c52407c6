"""Part 2 of the demo's tour: positions of the tokens of a prompt with a picture, in time, height and width.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it. Positions and places of the pictures
come from the trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.events import some
from m5_chunked_prefill_spec.demo_parts.stage import headline
from m6_multimodal_pd.events import ItemReceived, PositionsAssigned

AROUND = 4  # tokens of text before a picture, and after it
MOST_PLACES = 16  # a larger picture is shown in part
WIDEST_GRID = 12  # columns of merged patches
AXES = ("time", "height", "width")


@dataclass(frozen=True)
class Prompt:
    """A prompt with a picture, and the events about it."""

    question: str
    token_ids: Sequence[int]
    item: ItemReceived
    """Its first picture."""
    assigned: PositionsAssigned

    @property
    def start(self) -> int:
        """Index of the picture's first token."""
        return self.item.offsets[0][0]

    @property
    def end(self) -> int:
        """Index of the first token after the picture."""
        return self.item.offsets[-1][1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the picture's first block."""
        (top, bottom), (left, right) = self.assigned.heights[0], self.assigned.widths[0]
        return bottom - top + 1, right - left + 1


class Place(NamedTuple):
    """One token of a prompt."""

    place: int
    text: str
    position: tuple[int, int, int]
    """In time, height and width."""
    is_picture: bool


def show_positions(still: Prompt, clip: Prompt, text_of: Callable[[int], str], console: Console) -> list[str]:
    """Show the positions of a prompt with a picture, its block as three grids, and their meaning.

    `text_of` decodes a token.
    """
    headline(
        console,
        "2. Where the tokens stand",
        "Every token has three positions: in time, in height and in width. A text counts up on all three alike, as "
        "always. The tokens of a picture share the time, and have the row and the column of their patch.",
    )
    console.print(Text(f"The prompt of {still.question!r}", style="bold"))
    console.print(position_table(places(still, text_of)))
    console.print()
    if still.shape[1] <= WIDEST_GRID:
        console.print(Text("The picture's block, as it lies in the picture", style="bold"))
        console.print(grids(still))
        console.print()
    console.print(Text(explained(still)))
    console.print(Text(clip_explained(clip)))
    return [fact(still)]


def positions_of(assigned: PositionsAssigned) -> np.ndarray:
    """Return the positions of all tokens, int64 `[3, num_tokens]`, from the ranges of the blocks."""
    columns: list[tuple[int, int, int]] = []
    following = 0
    blocks = zip(assigned.starts, assigned.times, assigned.heights, assigned.widths, strict=True)
    for start, (time, _), (top, bottom), (left, right) in blocks:
        columns += [(following + i,) * 3 for i in range(start - len(columns))]
        columns += [(time, row, column) for row in range(top, bottom + 1) for column in range(left, right + 1)]
        following = max(time, bottom, right) + 1
    columns += [(following + i,) * 3 for i in range(assigned.num_tokens - len(columns))]
    return np.array(columns).T


def places(prompt: Prompt, text_of: Callable[[int], str]) -> list[Place]:
    """Return the tokens of the first picture and some around it, in order."""
    found = range(max(prompt.start - AROUND, 0), min(prompt.end + AROUND, prompt.assigned.num_tokens))
    positions = positions_of(prompt.assigned).T.tolist()
    return [Place(i, text_of(prompt.token_ids[i]), tuple(positions[i]), prompt.start <= i < prompt.end) for i in found]


def position_table(found: list[Place]) -> Table:
    """Return a line for each token; of a large picture the first and the last ones."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("place", "token", *AXES):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    block = [one.place for one in found if one.is_picture]
    skipped = block[MOST_PLACES // 2 : -MOST_PLACES // 2] if len(block) > MOST_PLACES else []
    for one in found:
        if skipped and one.place == skipped[0]:
            table.add_row("", Text(f"... {len(skipped):,} more ...", style="dim"))
        if one.place in skipped:
            continue
        style = "cyan" if one.is_picture else "default"
        cells = (str(one.place), one.text.replace("\n", "\\n"), *map(str, one.position))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def grids(prompt: Prompt) -> Table:
    """Return time, height and width of the first picture's tokens, each as a grid of its rows and columns."""
    table = Table.grid(padding=(0, 6, 0, 0))
    table.add_row(*(Text(axis, style="dim") for axis in AXES))
    block = positions_of(prompt.assigned)[:, prompt.start : prompt.end].reshape(3, *prompt.shape)
    table.add_row(*(Text(grid_text(grid), style="cyan") for grid in block))
    return table


def grid_text(grid: np.ndarray) -> str:
    """Return numbers in rows and columns."""
    width = len(str(grid.max()))
    return "\n".join(" ".join(f"{number:>{width}}" for number in row) for row in grid.tolist())


def explained(prompt: Prompt) -> str:
    """Return the numbers in sentences."""
    own, (rows, columns) = positions_of(prompt.assigned)[0], prompt.shape
    first, after = int(own[prompt.start]), int(own[prompt.end])
    number = prompt.assigned.num_tokens
    end = number + prompt.assigned.delta
    return (
        f"{some(prompt.item.num_tokens, 'token')} of picture advance the position by {after - first}: the block is "
        f"{rows} high and {columns} wide, begins at {first}, and the text goes on behind its largest position, at "
        f"{after}. So place {prompt.end} has position {after}; the {some(number, 'token')} of the prompt end at "
        f"position {end - 1}, and the first token of the answer has position {end}, not {number}."
    )


def fact(prompt: Prompt) -> str:
    """Return the same in short."""
    return (
        f"A prompt of {some(prompt.assigned.num_tokens, 'token')} with a picture ends "
        f"{some(-prompt.assigned.delta, 'position')} earlier than one of text: rows and columns count a picture's "
        f"sides, not its area."
    )


def clip_explained(prompt: Prompt) -> str:
    """Return the same for a clip, whose frames are a block each."""
    offsets = prompt.item.offsets
    spans = [f"{start} to {end - 1}" for start, end in offsets]
    starts = [str(time) for time, _ in prompt.assigned.times[: len(offsets)]]
    blocks = f"{some(len(offsets), 'block')} of {some(min(end - start for start, end in offsets), 'token')}"
    return (
        f"The clip's frames are encoded in pairs: {blocks} in its prompt, at places {' and '.join(spans)}, each "
        f"behind a text with its time in seconds. Their times are {' and '.join(starts)}: a later pair stands at a "
        f"later position."
    )
