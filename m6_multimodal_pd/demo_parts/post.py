"""What engines that share the work have told: kept as it comes, followed for one request, shown once more slowly.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.events import EngineJoined, Reported, RequestRouted

TRANSFER = ("room_taken", "kv_poll_changed", "chunk_sent", "chunk_received")
"""Kinds of events that tell of a transfer."""
SHOWN = (*TRANSFER, "batch", "encoder_run")
FRAMES = 90
"""In which all of it is shown once more, at most."""
PAUSE_S = 0.07
"""After each."""


@dataclass(frozen=True)
class Word:
    """Something that an engine has said, and when it was heard."""

    at: float
    event: Reported


class Post:
    """A trace reader that remembers who joined, who got what, and what engines said of it."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineJoined] = {}
        self.routed: dict[str, RequestRouted] = {}
        self.words: list[Word] = []

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if isinstance(event, EngineJoined):
            self.engines[event.name] = event
        elif isinstance(event, RequestRouted):
            self.routed[event.rid] = event
        elif isinstance(event, Reported) and event.what in SHOWN:
            self.words.append(Word(time.perf_counter(), event))

    def close(self) -> None:
        """Nothing to let go of."""

    def clear(self) -> None:
        """Forget what was about requests."""
        self.routed, self.words = {}, []

    def of(self, rid: str) -> list[Reported]:
        """What was said of a request's transfer, by both engines, causes before effects."""
        return [word.event for word in self.words if word.event.what in TRANSFER and word.event.rids == (rid,)]

    def num_chunks(self, rid: str) -> int:
        """In how many pieces its KV came."""
        return sum(event.what == "chunk_received" for event in self.of(rid))


def replay(post: Post, rids: Sequence[str], console: Console) -> None:
    """Draw what has just happened once more, slowly enough to be read: both engines, and every request's transfer."""
    if not post.words:
        return
    begin, end = post.words[0].at, post.words[-1].at
    frame = max(end - begin, 1e-9) / FRAMES
    times = PAUSE_S / frame
    heard = 0
    with Live(console=console, auto_refresh=False) as live:
        for _, words in groupby(post.words, key=lambda word: int((word.at - begin) / frame)):
            heard += len(list(words))
            live.update(view(post, rids, heard, f"slowed down {times:,.0f} times"), refresh=True)
            time.sleep(PAUSE_S)


def view(post: Post, rids: Sequence[str], heard: int, status: str) -> Group:
    """How it stood when the first `heard` words had been said."""
    said = [word.event for word in post.words[:heard]]
    engines = Table("engine", "step", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in sorted(post.engines, reverse=True):  # prompts first
        own = [event for event in said if event.engine == name]
        doing = next((event.said for event in reversed(own) if event.what in ("batch", "encoder_run")), "waits")
        engines.add_row(name, str(own[-1].its_step if own else 0), Text(doing, overflow="ellipsis", no_wrap=True))
    transfers = Table("transfer", "by", "the last word of it", box=None, padding=(0, 2, 0, 0))
    for rid in rids:
        own = [event for event in said if event.what in TRANSFER and event.rids == (rid,)]
        last = own[-1] if own else None
        words = Text(last.said if last else "", overflow="ellipsis", no_wrap=True)
        transfers.add_row(rid, last.engine if last else "", words)
    return Group(engines, Text(), transfers, Text(status, style="dim"))
