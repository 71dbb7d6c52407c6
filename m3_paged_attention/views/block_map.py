"""Block map: the holders of every KV block after each step, computed from the trace.

    step 6: 9 of 16 blocks in use, 2 of them by several requests; 7 free
    A req-0  B req-1/0  C req-1/1
       1  A  A  A  a  B2 B2 b  c  B  .  .  .  .  .  .  .
    req-0 needs room for 25 tokens: it gets ...

A trace reader: attach it before the first request, run, and read its `frames`, one per step. A frame is numbers and
names; `draw` shows it on a console, in letters and colours with the same meaning. vLLM and SGLang report the number of
used blocks, without owners.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from string import ascii_uppercase
from typing import TypeVar

from rich.console import Group
from rich.text import Text

from m1_single_request.events import Event, RequestAdded, some
from m1_single_request.output_events import Finish
from m1_single_request.trace_readers import OpenSteps
from m1_single_request.tracer import TraceReader, TraceRecord
from m2_continuous_batching.events import Batch
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_events import BlockCopied, BlocksAllocated, BlocksForked, BlocksFreed, BlocksSwapped
from m3_paged_attention.scheduler_events import Admit, NotAdmitted, ParallelSampling, Preempted

E = TypeVar("E", bound=Event)
Tables = dict[str, tuple[int, ...]]
"""Block tables by request id."""

DECISIONS = (
    Preempted, BlockCopied, BlocksForked, BlocksSwapped, NotAdmitted, Admit, ParallelSampling, Finish,
    BlocksFreed, BlocksAllocated,
)  # fmt: skip
"""Events that change the map or give the reason why it does not change, the most remarkable kind first."""
COLOURS = ("cyan", "magenta", "yellow", "green", "bright_blue", "red", "bright_cyan")
CELL = 3  # characters: a letter, a mark, a gap
LABEL = 7  # characters before the cells of a line, for the number of its first block
KEY = "A  full block of A    a  A still fills it    A3  held by 3, A first    .  free"
"""Legend of the cells."""


@dataclass(frozen=True)
class Block:
    """One block at the end of a step."""

    block_id: int
    holders: tuple[str, ...]
    """The requests whose tables contain it, in the order of arrival; empty if the block is free."""
    num_tokens: int
    """Number of its slots that hold the KV of a token."""


@dataclass
class Frame:
    """The map at the end of one step."""

    step: int = 0
    num_blocks: int = 0
    """Blocks that can be allocated; their ids are 1 to `num_blocks`."""
    block_size: int = 1
    """Tokens per block."""
    requests: tuple[str, ...] = ()
    """All requests so far, in the order of arrival. The index of a request never changes, so it can select a colour."""
    tables: Tables = field(default_factory=dict)
    """Device blocks by request id, in the order of the request's tokens."""
    num_kv: dict[str, int] = field(default_factory=dict)
    """Number of tokens with KV, at least for each request in `tables`."""
    host_tables: Tables = field(default_factory=dict)
    """Host blocks of swapped-out requests by request id."""
    waiting: dict[str, str] = field(default_factory=dict)
    """Unfinished requests that do not run, in their order: `waits` or `preempted`."""
    events: list[Event] = field(default_factory=list)
    """Events of this step of the kinds in `DECISIONS`, in the order of the trace."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the order of their ids."""
        holders: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        for request_id in sorted(self.tables, key=self.requests.index):
            for index, block_id in enumerate(self.tables[request_id]):
                inside = min(self.num_kv.get(request_id, 0) - index * self.block_size, self.block_size)
                holders.setdefault(block_id, []).append(request_id)
                filled[block_id] = max(filled.get(block_id, 0), inside)
        block_ids = range(1, self.num_blocks + 1)
        return tuple(Block(each, tuple(holders.get(each, ())), filled.get(each, 0)) for each in block_ids)

    @property
    def num_used(self) -> int:
        return sum(bool(block.holders) for block in self.blocks)

    @property
    def num_shared(self) -> int:
        return sum(len(block.holders) > 1 for block in self.blocks)

    def of(self, kind: type[E]) -> list[E]:
        """Return the decisions of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def decisions(self) -> list[Event]:
        """Return all decisions, the most remarkable first."""
        return sorted(self.events, key=lambda event: DECISIONS.index(type(event)))


class BlockMap(TraceReader):
    """Trace reader that stores a frame of every step."""

    def __init__(self) -> None:
        self.sized: KVSized | None = None
        """The event of the memory's size; None if the reader was attached later."""
        self.frames: list[Frame] = []
        self._now = Frame()
        self._decisions = OpenSteps[list[Event]](list)

    def read(self, record: TraceRecord) -> None:
        """Apply one record."""
        event, now = record.event, self._now
        self._change(event)
        if isinstance(event, DECISIONS):
            self._decisions.of(record.step).append(event)
        if event.ends_step:
            now.step, now.events = record.step, self._decisions.end(record.step)
            self.frames.append(Frame(**{name: copy(value) for name, value in vars(now).items()}))

    def _change(self, event: Event) -> None:
        now = self._now
        match event:
            case KVSized():
                self.sized, now.num_blocks, now.block_size = event, event.num_blocks, event.block_size
            case RequestAdded():
                now.requests, now.waiting[event.rid] = tuple(dict.fromkeys((*now.requests, event.rid))), "waits"
            case Admit():
                now.waiting.pop(event.rid, None)
            case BlocksAllocated():
                now.tables[event.owner] = (*now.tables.get(event.owner, ()), *event.block_ids)
            case BlocksForked():
                now.tables[event.owner], now.num_kv[event.owner] = event.block_ids, event.num_tokens
            case BlockCopied():
                table = now.tables.get(event.owner, ())
                now.tables[event.owner] = tuple(event.target if b == event.source else b for b in table)
            case BlocksSwapped():
                self._drop(event.owner)
                here, blocks = (now.host_tables, event.host_block_ids), (now.tables, event.block_ids)
                tables, block_ids = here if event.direction == "out" else blocks
                tables[event.owner] = block_ids
            case Batch():
                now.num_kv |= dict(zip(event.rids, event.seq_lens, strict=True))
            case Preempted():
                now.waiting = {event.rid: "preempted"} | now.waiting
            case BlocksFreed():
                self._drop(event.owner)
                now.num_kv.pop(event.owner, None)
            case Finish():
                self._drop(event.rid)
                now.waiting.pop(event.rid, None)

    def _drop(self, request_id: str) -> None:
        """Remove the blocks of a request, on the device and on the host."""
        self._now.tables.pop(request_id, None)
        self._now.host_tables.pop(request_id, None)


# --- on a console -----------------------------------------------------------------------------------------------------


def draw(frame: Frame, width: int, *, most: int = 3) -> Group:
    """Draw a frame in lines of at most `width` characters, and below it at most `most` of its decisions."""
    used = f"{frame.num_used} of {some(frame.num_blocks, 'block')} in use"
    shared = f", {frame.num_shared} of them by several requests" if frame.num_shared else ""
    title = Text.assemble((f"step {frame.step}", "bold"), f": {used}{shared}; {frame.num_blocks - frame.num_used} free")
    decisions = frame.decisions()
    words = [Text(event.explain(), style=event.style) for event in decisions[:most]]
    if len(decisions) > most:
        words.append(Text(f"... and {some(len(decisions) - most, 'decision')} more", style="dim"))
    return Group(title, _names(frame), *_rows(frame, width), *words)


def _names(frame: Frame) -> Text:
    """Return the letters of requests with blocks, on the device or the host, then of waiting ones."""
    running = {rid: "" for rid in sorted(frame.tables, key=frame.requests.index)}
    waiting = {rid: f" ({state})" for rid, state in frame.waiting.items()}
    on_host = {rid: f" (on the host: {some(len(blocks), 'block')})" for rid, blocks in frame.host_tables.items()}
    states = running | waiting | on_host
    names = [
        Text.assemble(_letter(frame, rid), f"\N{NO-BREAK SPACE}{rid}", (state, "dim")) for rid, state in states.items()
    ]
    return Text("  ").join(names) if names else Text("no request holds a block", style="dim")


def _letter(frame: Frame, request_id: str) -> tuple[str, str]:
    """Return the request's letter and colour, which repeat at different distances."""
    number = frame.requests.index(request_id)
    return ascii_uppercase[number % len(ascii_uppercase)], COLOURS[number % len(COLOURS)]


def _rows(frame: Frame, width: int) -> Iterator[Text]:
    """Return the lines of the grid; adjacent free ones become one."""
    each = max(1, (width - LABEL) // (8 * CELL)) * 8
    rows = [frame.blocks[first : first + each] for first in range(0, frame.num_blocks, each)]
    for is_used, group in groupby(rows, key=lambda row: any(block.holders for block in row)):
        lines = list(group)
        free = [(f"... {lines[-1][-1].block_id} free", "dim")]
        for row in lines if is_used else lines[:1]:
            cells = [_cell(frame, block) for block in row] if is_used else free
            yield Text.assemble((f"{row[0].block_id:>{LABEL - 2}}  ", "dim"), *cells)


def _cell(frame: Frame, block: Block) -> Text:
    if not block.holders:
        return Text(".".ljust(CELL), style="dim")
    name, colour = _letter(frame, block.holders[0])
    count = len(block.holders)
    mark = " " if count == 1 else str(count) if count < 10 else "+"
    is_full = block.num_tokens == frame.block_size
    style = f"black on {colour}" if is_full else f"bold {colour}"
    return Text.assemble(((name if is_full else name.lower()) + mark, style), " " * (CELL - 2))
