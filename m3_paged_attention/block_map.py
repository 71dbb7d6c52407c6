"""Block map: the holders of every KV block after each step, computed from the trace.

Like m2's timeline, it is a trace reader: attach it before the first request, run, and read its `frames`, one per step.
A frame is numbers and names; `demo_parts/block_map_view.py` draws it on a console, and other views can use the same
frames. New in m3: in m2 a request kept one slot. vLLM and SGLang report the number of used blocks, without owners.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from m1_single_request.events import Event, RequestAdded
from m1_single_request.output_events import Finish
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching.events import Batch
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_events import (
    BlockCopied,
    BlocksAllocated,
    BlocksForked,
    BlocksFreed,
    BlocksSwapped,
    BlocksUsed,
)
from m3_paged_attention.scheduler_events import Admit, NotAdmitted, ParallelSampling, Preempted

E = TypeVar("E", bound=Event)
Tables = Mapping[str, tuple[int, ...]]
"""Block tables by request id."""

DECISIONS = (
    Preempted, BlockCopied, BlocksForked, BlocksSwapped, NotAdmitted, Admit, ParallelSampling, Finish,
    BlocksFreed, BlocksAllocated,
)  # fmt: skip
"""Events that change the map or give the reason why it does not change, the most remarkable kind first."""


@dataclass(frozen=True)
class Block:
    """One block at the end of a step."""

    block_id: int
    holders: tuple[str, ...]
    """The requests whose tables contain it, in the order of arrival; empty if the block is free."""
    num_tokens: int
    """Number of its slots that hold the KV of a token."""


@dataclass(frozen=True)
class Frame:
    """The map at the end of one step."""

    step: int
    num_blocks: int
    """Blocks that can be allocated; their ids are 1 to `num_blocks`."""
    block_size: int
    """Tokens per block."""
    requests: tuple[str, ...]
    """All requests so far, in the order of arrival. The index of a request never changes, so it can select a colour."""
    tables: Tables
    """Device blocks by request id, in the order of the request's tokens."""
    host_tables: Tables
    """Host blocks of swapped-out requests by request id."""
    num_kv: Mapping[str, int]
    """Number of tokens with KV, for each request in `tables`."""
    waiting: tuple[str, ...]
    """Unfinished requests that do not run."""
    preempted: frozenset[str]
    """Waiting requests that were preempted."""
    events: tuple[Event, ...]
    """Events of this step of the kinds in `DECISIONS`, in the order of the trace."""
    usage: BlocksUsed | None = None
    """The engine's own count of used blocks and tokens; None after a step without a forward."""

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
        return tuple(
            Block(block_id, tuple(holders.get(block_id, ())), filled.get(block_id, 0))
            for block_id in range(1, self.num_blocks + 1)
        )

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
        """Return all decisions, the most remarkable first, without the `BlocksFreed` of preempted requests."""
        preempted = {event.rid for event in self.of(Preempted)}
        shown = [e for e in self.events if not (isinstance(e, BlocksFreed) and e.owner in preempted)]
        return sorted(shown, key=lambda event: DECISIONS.index(type(event)))


@dataclass
class _State:
    """State of the map between two events."""

    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    host_tables: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_kv: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)


class BlockMap:
    """Trace reader that stores a frame of every step."""

    def __init__(self) -> None:
        self.sized: KVSized | None = None
        """The event of the memory's size; None if the reader was attached later."""
        self.frames: list[Frame] = []
        self.prompt_lens: dict[str, int] = {}
        """Number of prompt tokens by request id."""
        self._num_blocks = 0
        self._block_size = 1
        self._requests: list[str] = []
        self._now = _State()
        self._events: list[Event] = []
        self._usage: BlocksUsed | None = None
        self._last_refusal: NotAdmitted | None = None  # the last one, to skip repetitions

    def read(self, record: TraceRecord) -> None:
        """Apply one record."""
        event = record.event
        change = CHANGES.get(type(event))
        if change is not None:
            change(self, event)
        if isinstance(event, DECISIONS) and self._is_new(event):
            self._events.append(event)
        if event.ends_step:
            self._end_step(record.step)

    def close(self) -> None:
        """Keep all frames, so that they can be drawn after the run."""

    def of(self, kind: type[E]) -> Iterator[tuple[Frame, E]]:
        """Yield all decisions of one kind so far, each with the frame of its step."""
        for frame in self.frames:
            for event in frame.of(kind):
                yield frame, event

    def _is_new(self, event: Event) -> bool:
        """Return False for a `NotAdmitted` with the same request and reason as the last one."""
        if not isinstance(event, NotAdmitted):
            return True
        last, self._last_refusal = self._last_refusal, event
        return last is None or (last.rid, last.limit) != (event.rid, event.limit)

    def _end_step(self, step: int) -> None:
        now = self._now
        self.frames.append(
            Frame(
                step=step,
                num_blocks=self._num_blocks,
                block_size=self._block_size,
                requests=tuple(self._requests),
                tables=dict(now.tables),
                host_tables=dict(now.host_tables),
                num_kv={request_id: now.num_kv.get(request_id, 0) for request_id in now.tables},
                waiting=tuple(now.waiting),
                preempted=frozenset(now.preempted),
                events=tuple(self._events),
                usage=self._usage,
            )
        )
        self._events, self._usage = [], None

    # --- what each event changes --------------------------------------------------------------------------------------

    def _size(self, event: KVSized) -> None:
        self.sized = event
        self._num_blocks, self._block_size = event.num_blocks, event.block_size

    def _count(self, event: BlocksUsed) -> None:
        self._usage = event
        self._num_blocks, self._block_size = event.num_used + event.num_free, event.block_size

    def _arrive(self, event: RequestAdded) -> None:
        self._add_request(event.rid)
        self.prompt_lens[event.rid] = event.len
        self._now.waiting[event.rid] = None

    def _admit(self, event: Admit) -> None:
        self._now.waiting.pop(event.rid, None)
        self._now.preempted.discard(event.rid)

    def _allocate(self, event: BlocksAllocated) -> None:
        self._add_request(event.owner)
        self._now.tables[event.owner] = (*self._now.tables.get(event.owner, ()), *event.block_ids)

    def _fork(self, event: BlocksForked) -> None:
        self._add_request(event.owner)
        self._now.tables[event.owner] = event.block_ids
        self._now.num_kv[event.owner] = event.num_tokens

    def _copy(self, event: BlockCopied) -> None:
        table = self._now.tables.get(event.owner, ())
        self._now.tables[event.owner] = tuple(event.target if b == event.source else b for b in table)

    def _swap(self, event: BlocksSwapped) -> None:
        self._remove_blocks(event.owner, keep_length=True)
        if event.direction == "out":
            self._now.host_tables[event.owner] = event.host_block_ids
        else:
            self._now.tables[event.owner] = event.block_ids

    def _compute(self, event: Batch) -> None:
        self._now.num_kv |= dict(zip(event.rids, event.seq_lens, strict=True))

    def _preempt(self, event: Preempted) -> None:
        self._send_back(event.rid)

    def _free(self, event: BlocksFreed) -> None:
        self._remove_blocks(event.owner)

    def _finish(self, event: Finish) -> None:
        self._remove_blocks(event.rid)
        self._now.waiting.pop(event.rid, None)
        self._now.preempted.discard(event.rid)

    def _add_request(self, request_id: str) -> None:
        """Add a request to the list. For one that arrived before the reader, this is at its first block."""
        if request_id not in self._requests:
            self._requests.append(request_id)

    def _remove_blocks(self, request_id: str, *, keep_length: bool = False) -> None:
        """Remove the blocks of a request, on the device and on the host."""
        self._now.tables.pop(request_id, None)
        self._now.host_tables.pop(request_id, None)
        if not keep_length:
            self._now.num_kv.pop(request_id, None)

    def _send_back(self, request_id: str) -> None:
        """Put a preempted request before the waiting ones."""
        self._now.waiting = {request_id: None} | self._now.waiting
        self._now.preempted.add(request_id)


CHANGES: dict[type[Event], Callable[[BlockMap, Any], None]] = {
    KVSized: BlockMap._size,
    BlocksUsed: BlockMap._count,
    RequestAdded: BlockMap._arrive,
    Admit: BlockMap._admit,
    BlocksAllocated: BlockMap._allocate,
    BlocksForked: BlockMap._fork,
    BlockCopied: BlockMap._copy,
    BlocksSwapped: BlockMap._swap,
    Batch: BlockMap._compute,
    Preempted: BlockMap._preempt,
    BlocksFreed: BlockMap._free,
    Finish: BlockMap._finish,
}
"""Event type -> method that applies it; other events do not change the map."""
