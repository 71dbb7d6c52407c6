"""Engines that share the work, watched: drawn while they work, and once more slowly if that was too fast to be read.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it. What is measured is not slowed down: the
engines are processes of their own, and do not wait for whoever watches.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.events import size, some
from m6_multimodal_pd.demo_parts.post import Board, Post, Transfer

EVERY_S = 0.1
"""Between two drawings of what happens now: each takes time from the engines."""
REPLAY_S = 9.0
"""All of it once more takes so long. Nothing is shown again that took longer than this."""
FRAMES = 90
PAUSE_S = REPLAY_S / FRAMES
AROUND = 10
"""Lines of a screen for all but the transfers."""


@contextmanager
def watched(post: Post, engine: Any, console: Console) -> Iterator[Callable[[object], None]]:
    """Draws what happens, when it is called after a step."""
    board, heard, drawn = Board(), 0, 0.0
    post.look(engine.engine_core.router.members)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def after_step(_: object) -> None:
            nonlocal heard, drawn
            post.look(engine.engine_core.router.members)
            if time.perf_counter() - drawn >= EVERY_S:
                board.hear(post.words[heard:])
                heard = len(post.words)
                live.update(view(post, board, "as it happens", console), refresh=True)
                drawn = time.perf_counter()

        yield after_step


def replay(post: Post, console: Console) -> None:
    """Draw what has just happened once more, slowly enough to be read."""
    begin, took = post.words[0].at, post.words[-1].at - post.words[0].at
    if took >= REPLAY_S:
        return
    board, heard = Board(), 0
    with Live(console=console, auto_refresh=False) as live:
        for frame in range(1, FRAMES + 1):
            now = took * frame / FRAMES
            here = sum(word.at - begin <= now for word in post.words) if frame < FRAMES else len(post.words)
            board.hear(post.words[heard:here])
            heard = here
            slower = (
                f"once more, {REPLAY_S / max(took, 1e-9):,.0f} times slower: {now * 1e3:,.0f} of {took * 1e3:,.0f} ms"
            )
            live.update(view(post, board, slower, console), refresh=True)
            time.sleep(PAUSE_S)


def view(post: Post, board: Board, status: str, console: Console) -> Group:
    """Both tables."""
    most = max(console.height - AROUND - len(post.engines), 1)
    transfers = list(board.transfers.values())
    if len(transfers) > most:  # there is no room for all: those that are over are left out first
        transfers.sort(key=lambda one: one.is_over)
    if len(transfers) > most:
        status += f"; {some(len(transfers) - most, 'transfer')} more"
    legend = Text("chunks: there/sent; pages: there/to come", "dim")
    return Group(
        engines_table(post, board), Text(), transfers_table(transfers[:most]), legend, Text(status, style="dim")
    )


def engines_table(post: Post, board: Board) -> Table:
    """A line for each engine, those for prompts first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("engine", no_wrap=True)
    for name in ("steps", "running", "waiting", "free tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("its last step")  # what is left of the width
    for name in sorted(post.engines, key=lambda name: (post.engines[name].role != "prefill", name)):
        stands, work = board.standing.get(name), board.work.get(name)
        numbers = () if stands is None else (stands.num_steps, stands.num_running, stands.num_waiting)
        free = post.engines[name].total_tokens if stands is None else stands.free_tokens
        said = Text("" if work is None else work.text, overflow="ellipsis", no_wrap=True)
        table.add_row(name, *map(str, numbers or ("", "", "")), f"{free:,}", said)
    return table


def transfers_table(transfers: list[Transfer]) -> Table:
    """A line for each transfer; the columns are so wide that they stay where they are."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("prefill side", "decode side"):
        table.add_column(name, no_wrap=True, min_width=max(map(len, STYLES)))
    for name, width in (("chunks", 6), ("pages", 7), ("moved", 9)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for one in transfers:
        table.add_row(
            one.rid,
            *(Text(one.state[side], STYLES[one.state[side]]) for side in ("prefill", "decode")),
            f"{one.num_received}/{len(one.sent)}",
            f"{one.num_pages}/{'?' if one.all_pages is None else one.all_pages}",
            size(one.num_bytes),
        )
    return table


STYLES = {
    "bootstrapping": "dim",
    "waiting for input": "yellow",
    "transferring": "cyan",
    "success": "green",
    "failed": "red",
}
"""By state."""
