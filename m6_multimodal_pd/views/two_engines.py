"""Engines that share the work, drawn from the trace of their router alone: the state of each, and all transfers.

    view = TwoEnginesView()       # a reader of the trace: TraceConfig(readers=(view,))
    console.print(view.draw())    # now

    engine     steps  running  waiting  KV tokens     last step
    prefill-0  5      1        2        354 of 8,192  Batch of 2 requests: req-4, req-5 prefill 128 ...
    decode-0   9      4        0        410 of 8,192  Batch of 4 requests: req-0, req-1, req-2, req-3 ...

           prefill side       decode side        chunks  pages  moved
    req-0  success            success            1/1     3/3    192.0 KiB
    req-5  transferring       waiting for input  1/2     8/19   512.0 KiB

Chunks and pages: those that have arrived, and those that were sent or are expected. New in m6: one engine had no router
before, whose trace has the events of its engines as `Reported`.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from m1_single_request.events import size
from m1_single_request.tracer import TraceReader, TraceRecord
from m6_multimodal_pd.disaggregation.events import EngineJoined, EngineLost, Reported, RequestRouted

REPLAY_S = 8.0
START = "BOOTSTRAPPING"
STYLES = {START: "dim", "WAITING_FOR_INPUT": "yellow", "TRANSFERRING": "cyan", "SUCCESS": "green", "FAILED": "red"}
"""Colours of the states of a transfer."""


class TwoEnginesView(TraceReader):
    """Keeps the last reports of all engines of a group, and the transfers of the last requests.

    Of a request with several attempts only the last transfer is kept.
    """

    most_requests = 40
    """Maximum number of requests that are kept and drawn."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineJoined] = {}
        self.latest: dict[tuple[str, str], Reported] = {}
        """By engine and kind of event."""
        self.rooms: dict[str, int] = {}
        """Number of the transfer of each request, by its id."""
        self.transfers: dict[Any, list[Reported]] = {}
        """Reports about a transfer, by its number."""

    def read(self, record: TraceRecord) -> None:
        """Keep an event of the router."""
        match record.event:
            case EngineJoined() as event:
                self.engines[event.name] = event
            case EngineLost() as event:
                self.engines.pop(event.name, None)
            case RequestRouted() as event:
                self._begin(event.rid, event.room)
            case Reported() as event:
                self.latest[event.engine, event.what] = event
                self.transfers.get(dict(event.facts).get("room"), []).append(event)

    def _begin(self, rid: str, room: int) -> None:
        """Begin a transfer; forget the one of an earlier attempt, and those of the oldest requests."""
        self.transfers.pop(self.rooms.pop(rid, None), None)
        self.rooms[rid], self.transfers[room] = room, []
        for oldest in list(self.rooms)[: -self.most_requests]:
            del self.transfers[self.rooms.pop(oldest)]

    def draw(self) -> Group:
        """Return a table of the engines, those of prompts first, and one of the transfers."""
        columns = [Column(name, no_wrap=True) for name in ("engine", "steps", "running", "waiting", "KV tokens")]
        engines = Table(*columns, "last step", box=None, padding=(0, 2, 0, 0))
        for joined in sorted(self.engines.values(), key=lambda joined: (joined.role != "prefill", joined.name)):
            engines.add_row(*self._engine(joined))
        sides = [Column(name, min_width=max(map(len, STYLES))) for name in ("prefill side", "decode side")]
        transfers = Table("", *sides, "chunks", "pages", "moved", box=None, padding=(0, 2, 0, 0))
        for rid, room in list(self.rooms.items()):
            transfers.add_row(rid, *cells(self.transfers[room]))
        return Group(engines, Text(), transfers)

    def _engine(self, joined: EngineJoined) -> Iterator[str | Text]:
        """Yield the cells of an engine's line."""
        done, batch = (self.latest.get((joined.name, what)) for what in ("step_done", "batch"))
        state: dict[str, Any] = dict(() if done is None else done.facts)
        yield from (joined.name, str(0 if done is None else done.its_step))
        yield from (str(state.get(name, 0)) for name in ("num_running", "num_waiting"))
        yield f"{state.get('kv_tokens', 0):,} of {joined.total_tokens:,}"
        yield Text("" if batch is None else batch.text, no_wrap=True, overflow="ellipsis")


def cells(reports: Sequence[Reported]) -> Iterator[str | Text]:
    """Yield the cells of a transfer's line, from the reports of both engines about it."""
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        facts[report.what].append(dict(report.facts))
    changes = {each["side"]: each["new"] for each in facts["kv_poll_changed"]}
    for side in ("prefill", "decode"):
        state = changes.get(side, START)
        yield Text(state.replace("_", " ").lower(), STYLES[state])
    sent, received = {each["number"]: each["num_pages"] for each in facts["chunk_sent"]}, facts["chunk_received"]
    expected = [each["num_pages"] for each in facts["room_taken"]] or ["?"]
    yield f"{len(received)}/{len(sent)}"
    yield f"{sum(sent.get(each['number'], 0) for each in received)}/{expected[-1]}"
    yield size(sum(each["num_bytes"] for each in received))


def replay(records: Sequence[TraceRecord], console: Console) -> None:
    """Draw the trace of a run: on a terminal in slow motion, so that it takes REPLAY_S seconds; elsewhere its end."""
    view, now = TwoEnginesView(), next(each.time for each in records if isinstance(each.event, RequestRouted))
    slower = REPLAY_S / max(records[-1].time - now, 1e-3) if console.is_terminal else 0.0
    with Live(get_renderable=view.draw, console=console):
        for record in records:
            time.sleep(max(record.time - now, 0.0) * slower)
            now = max(record.time, now)
            view.read(record)
