"""Frames of the block map on a console: a cell for each block, and the decisions of the step beside them.

    step 6: 9 of 16 blocks in use, 2 of them by several requests; 7 free
    A req-0  B req-1/0  C req-1/1
       1  A  A  A  a  B2 B2 b  c     req-0 needs room for 25 tokens: it gets ...
       9  B  .  .  .  .  .  .  .     ...

Letters have the same meaning as colours, for a screen without colours. `block_map.py` computes the map; this file does
not use the engine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from string import ascii_uppercase

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.events import Event, some
from m3_paged_attention.block_map import Block, BlockMap, Frame

COLOURS = (
    "cyan", "magenta", "yellow", "green", "bright_blue", "red", "bright_cyan", "bright_magenta", "bright_yellow",
    "bright_green", "bright_red",
)  # fmt: skip
CELL = 3  # characters: a letter, a mark, a gap
MOST_ROWS = 16  # with more lines than this, the free ones among them are shown as one
LEAST_WORDS = 32  # columns that the decisions need beside the grid; with fewer they are below it
KEY = "A  full block of A    a  A still fills it    A3  held by 3, A first    .  free"
"""Legend of the cells."""


def letter(frame: Frame, request_id: str) -> str:
    """Return the request's letter; after the 26th the letters repeat."""
    return ascii_uppercase[frame.requests.index(request_id) % len(ascii_uppercase)]


def colour(frame: Frame, request_id: str) -> str:
    """Return the request's colour; letters and colours repeat at different distances."""
    return COLOURS[frame.requests.index(request_id) % len(COLOURS)]


def draw(frame: Frame, width: int, *, said: Sequence[tuple[int, Event]] | None = None, most: int = 3) -> Group:
    """Draw a frame in lines of at most `width` characters.

    Beside the grid are the decisions of `said` with their steps, or the frame's own, the most important first: at most
    `most` of them, and the number of the others.
    """
    grid = Group(*_rows(frame, width), *_host_line(frame))
    words = _words([([], e) for e in frame.decisions()] if said is None else [([str(n)], e) for n, e in said], most)
    beside = _label(frame) + 2 + CELL * per_row(frame, width)
    if width - beside < LEAST_WORDS:
        return Group(_title(frame), *_names(frame, width), grid, words)
    table = Table.grid(padding=0, expand=True)
    table.add_column(width=beside, no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(grid, words)
    return Group(_title(frame), *_names(frame, width), table)


def _words(told: Sequence[tuple[list[str], Event]], most: int) -> Table:
    """Return the decisions as sentences, each after its step number if it has one; the rest is only counted."""
    words = Table.grid(padding=(0, 1, 0, 0))
    for step, event in told[:most]:
        words.add_row(*(Text(n, style="dim") for n in step), Text(event.explain(), style=event.style))
    if len(told) > most:
        blank = [""] * len(told[0][0])
        words.add_row(*blank, Text(f"... and {some(len(told) - most, 'decision')} more", style="dim"))
    return words


def per_row(frame: Frame, width: int) -> int:
    """Return the cells per line: a multiple of eight that limits the height, within half the width."""
    room = (width // 2 - _label(frame)) // (8 * CELL)
    return 8 * max(1, min(room, ceil(frame.num_blocks / (8 * MOST_ROWS))))


def _label(frame: Frame) -> int:
    """Return the columns before the grid, for the number of a line's first block."""
    return max(4, len(str(frame.num_blocks))) + 2


def _title(frame: Frame) -> Text:
    shared = f", {frame.num_shared} of them by several requests" if frame.num_shared else ""
    used = f"{frame.num_used} of {some(frame.num_blocks, 'block')} in use{shared}; {frame.num_blocks - frame.num_used}"
    return Text.assemble((f"step {frame.step}", "bold"), f": {used} free")


def _names(frame: Frame, width: int) -> Iterator[Text]:
    """Return the letters of requests with blocks, then of waiting ones, in lines that break between names."""
    line = Text("")
    for request_id in [*sorted(frame.tables, key=frame.requests.index), *frame.waiting]:
        name = _name(frame, request_id)
        if line and len(line) + 2 + len(name) > width:
            yield line
            line = Text("")
        line = Text("  ").join([line, name]) if line else name
    yield line or Text("nobody holds any", style="dim")


def _name(frame: Frame, request_id: str) -> Text:
    state = "waits" if request_id in frame.waiting else ""
    state = "preempted" if request_id in frame.preempted else state
    said = (f" ({state})", "dim") if state else ""
    return Text.assemble((letter(frame, request_id), f"bold {colour(frame, request_id)}"), f" {request_id}", said)


def _rows(frame: Frame, width: int) -> Iterator[Text]:
    """Return the lines of the grid; if they are too many, adjacent free ones become one."""
    each, label = per_row(frame, width), _label(frame)
    rows = [frame.blocks[first : first + each] for first in range(0, frame.num_blocks, each)]
    free: list[Sequence[Block]] = []
    for row in [*rows, None]:
        if row is not None and len(rows) > MOST_ROWS and not any(block.holders for block in row):
            free.append(row)
            continue
        if free:
            yield Text(f"{free[0][0].block_id:>{label - 2}}  ... {free[-1][-1].block_id} free", style="dim")
            free = []
        if row is not None:
            line = Text(f"{row[0].block_id:>{label - 2}}  ", style="dim", end="")
            yield Text.assemble(line, *(_cell(frame, block) for block in row))


def _cell(frame: Frame, block: Block) -> Text:
    if not block.holders:
        return Text(".".ljust(CELL), style="dim")
    first, is_full = block.holders[0], block.num_tokens == frame.block_size
    name, shade = letter(frame, first), colour(frame, first)
    mark = " " if len(block.holders) == 1 else str(len(block.holders)) if len(block.holders) < 10 else "+"
    style = f"black on {shade}" if is_full else f"bold {shade}"
    return Text.assemble(((name if is_full else name.lower()) + mark, style), " " * (CELL - 2))


def _host_line(frame: Frame) -> list[Text]:
    """Return the host blocks by request, without a grid."""
    held = [f"{letter(frame, rid)} {some(len(blocks), 'block')}" for rid, blocks in frame.host_tables.items()]
    return [Text(f"on the host: {', '.join(held)}", style="yellow")] if held else []


@contextmanager
def live_view(block_map: BlockMap, console: Console, pause: Callable[[Frame], None]) -> Iterator[Callable[[], None]]:
    """View that draws the map anew after each step, with the latest decisions. At the end it is erased.

    Yields what is to be called after each step; `pause` then waits as long as a frame should be seen.
    """
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def step_done() -> None:
            frame = block_map.frames[-1]
            latest = [(f.step, event) for f in reversed(block_map.frames[-8:]) for event in f.decisions()]
            status = Text("slowed down to be watched", style="dim")
            live.update(Group(draw(frame, console.width, said=latest[:6], most=6), status), refresh=True)
            pause(frame)

        yield step_done
