"""Both ends of the KV transport: pages are copied into frames of memory that both engines map, and out again.

    prefill engine, a StagedSource                         decode engine, a StagedTarget
        send(target, pages)
        ready(target, ticket)    ---- Ticket --->              receive(source, ticket, its own pages)
        release(target, number)  <--- number ----              Arrival.write, when its copy is done

Up to m5 an engine has its KV alone. The two ends move pages and know no requests; they send no messages themselves: a
`Ticket` travels with the other messages of the engines (`runtime/messages.py`). There is one source per prefill engine
and one target per decode engine, each with several partners, known by the names of the engines. A source makes one
segment for each target, so that the frames of other targets outlive a target that dies, and a late message about an old
segment cannot touch a new one. A segment is in the source's GPU if the target can read it there (`offer`), and in
host memory else, page-locked if a GPU copies to it. No engine maps the KV memory of another one, so each page is copied
twice. On a GPU the copies run beside the steps, and their owner asks from time to time whether they are done; only
`forget` and `close` wait. New in this milestone. SGLang: the staging buffers in
`disaggregation/common/staging_handler.py`; vLLM: the host buffer of `nixl_connector.py` (`kv_buffer_device="cpu"`).
There one object per request moves KV and keeps the state of the request; here `poll.py` keeps the state.
"""

import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
from torch import Tensor

from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import PositiveInt, valid
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.events import PathChosen
from m6_multimodal_pd.disaggregation.page_store import Copy, PageStore
from m6_multimodal_pd.disaggregation.runtime.device_memory import nothing, page_lock
from m6_multimodal_pd.disaggregation.runtime.frames import FramePool
from m6_multimodal_pd.disaggregation.runtime.messages import DeviceSegment, Offer, Ticket
from m6_multimodal_pd.disaggregation.segments import Segments
from m6_multimodal_pd.errors import TransferError

NO_SHARED_GPU = "the two engines share no GPU memory"


@dataclass
class Outgoing:
    """The segment of a source for one target."""

    segment: str
    memory: Tensor  # [num_frames, page_bytes]
    frames: FramePool
    unlock: Callable[[], object]
    is_offered: bool = False
    """Whether the target has not answered the offer of a segment in GPU memory."""
    copies: dict[int, Copy] = field(default_factory=dict)
    """Copies into its frames, by the numbers of their tickets, until they are `ready`."""


@dataclass
class Incoming:
    """The segment that a target has from one source."""

    segment: str
    memory: Tensor  # [num_frames, page_bytes]
    unlock: Callable[[], object]
    last_number: int = -1


class StagedSource:
    """The end of a prefill engine: copies pages into segments, one of `num_frames` frames for each target.

    Belongs to one thread. All errors are `TransferError`s, and a call that raises one has changed no frame; but for
    `EngineDeadError` if the device is lost.
    """

    def __init__(self, store: PageStore, segments: Segments, *, num_frames: int, checksums: bool = False) -> None:
        """`checksums`: make one of each page, to find wrong writes."""
        self.store = store
        self.segments, self.device_segments = segments, segments.on_device(store.device)
        self.num_frames: int = valid("num_frames", num_frames, PositiveInt, ConfigError)
        self.checksums = checksums
        self.tracer = Tracer()  # that of the engine, once it has a side
        self.targets: dict[str, Outgoing] = {}
        """By name of the decode engine."""
        self.why_host: dict[str, str] = {}
        """By name of the decode engine: why its pages go through host memory."""
        self._numbers = count()  # for all targets: no number is used twice

    def offer(self, target: str, devices: Sequence[str]) -> Offer | None:
        """Make a segment in GPU memory for a new target that can read it, and return the message about it.

        No page is sent before its ticket is released. `devices`: UUIDs of the GPUs that the target can read. None: the
        target has a segment, or gets one in host memory.
        """
        if target in self.targets or target in self.why_host:
            return None
        try:
            if self.device_segments is None or self.device_segments.readable[0] not in devices:
                raise TransferError(NO_SHARED_GPU)
            description, memory = self.device_segments.create(self.num_frames * self.store.page_bytes)
        except TransferError as error:
            self.why_host[target] = str(error)
            return None
        segment = f"gpu-{secrets.token_hex(16)}"
        self.targets[target] = outgoing = self._outgoing(segment, memory, nothing)
        outgoing.is_offered = True
        ticket = Ticket(next(self._numbers), segment, self.num_frames, 0)
        outgoing.frames.hold(ticket.number, range(0))
        return Offer(ticket, description)

    def send(self, target: str, pages: Sequence[int]) -> Ticket | None:
        """Begin to copy pages into free frames, which the ticket holds from then on; the pages may change afterwards.

        None: there are not enough free frames side by side, or an offer has no answer; try again after a `release`.
        Raises for more pages than frames, a page that does not exist, and if there is no memory for the segment of a
        new target.
        """
        if len(pages) > self.num_frames:
            raise TransferError(f"{len(pages)} pages are sent at once, and there are {self.num_frames} frames: split")
        self.store.check_pages(pages)
        if target not in self.targets:
            segment, memory = self.segments.create(self.num_frames * self.store.page_bytes)
            unlock, problem = page_lock(memory, self.store.device)
            self.targets[target] = self._outgoing(segment, memory, unlock)
            why = self.why_host.get(target, NO_SHARED_GPU)
            self.tracer.emit(PathChosen, peer=target, path="host memory", why=f"{why}{problem and f'; {problem}'}")
        outgoing = self.targets[target]
        frames = None if outgoing.is_offered else outgoing.frames.find(len(pages))
        if frames is None:
            return None
        copy = self.store.read(pages, outgoing.memory[frames.start : frames.stop])
        ticket = Ticket(next(self._numbers), outgoing.segment, self.num_frames, frames.start)
        outgoing.copies[ticket.number] = copy
        outgoing.frames.hold(ticket.number, frames)  # last: a failed copy holds no frame
        return self.ready(target, ticket) or ticket

    def ready(self, target: str, ticket: Ticket) -> Ticket | None:
        """Return the ticket as it may be sent to its target, with its checksums; None until its frames hold the
        pages."""
        outgoing = self.targets.get(target)
        copy = None if outgoing is None else outgoing.copies.get(ticket.number)
        if outgoing is None or copy is None:
            return ticket
        if not copy.is_done():
            return None
        del outgoing.copies[ticket.number]
        return msgspec.structs.replace(ticket, checksums=_checksums(copy.rows)) if self.checksums else ticket

    def release(self, target: str, number: int) -> None:
        """Free the frames of this ticket, and with the first one remove the segment's name: the target has mapped it,
        or never will (then it is `refused`). Raises for a number that is not in transit."""
        outgoing = self._freed(target, number)
        if outgoing.is_offered:
            outgoing.is_offered = False
            self.tracer.emit(PathChosen, peer=target, path="GPU memory", why="it can read this GPU")
        self.segments.unlink(outgoing.segment)

    def refused(self, target: str, number: int, why: str) -> None:
        """Drop the segment of this ticket, which the target could not map. The next pages go through another one, in
        host memory. Raises for a number that is not in transit."""
        self._freed(target, number)
        self.forget(target)
        self.why_host[target] = f"it could not map the segment before: {why}"

    def forget(self, target: str) -> None:
        """Drop the segment of a target that is lost, with all its frames, when nothing is copied to them any more. No
        effect for an unknown target."""
        self.why_host.pop(target, None)
        outgoing = self.targets.pop(target, None)
        if outgoing is not None:
            self.store.wait()
            outgoing.unlock()
            self.segments.unlink(outgoing.segment)

    def close(self) -> None:
        """Drop all segments."""
        for target in list(self.targets):
            self.forget(target)

    def check_invariants(self) -> None:
        """Raise AssertionError if a frame is held twice, or one that does not exist; tests call it after each step."""
        for outgoing in self.targets.values():
            outgoing.frames.check_invariants()

    def _outgoing(self, segment: str, memory: Tensor, unlock: Callable[[], object]) -> Outgoing:
        return Outgoing(segment, memory.view(self.num_frames, -1), FramePool(self.num_frames), unlock)

    def _freed(self, target: str, number: int) -> Outgoing:
        """Free the frames of a ticket, and return the segment that has them."""
        outgoing = self.targets.get(target)
        if outgoing is None or number in outgoing.copies or not outgoing.frames.free(number):
            raise TransferError(f"target {shown(target)} releases {shown(number)}, which is not in transit to it")
        return outgoing


@dataclass(frozen=True)
class Arrival:
    """Pages on their way into the KV memory of a decode engine."""

    store: PageStore
    ticket: Ticket
    pages: Sequence[int]
    copy: Copy

    def write(self) -> None:
        """Copy what has come into its pages, when the copy is done and if they still belong to its request.

        Raises `TransferError` for wrong checksums, before anything is written."""
        assert self.copy.is_done(), "it is on its way"
        checksums = self.ticket.checksums
        if checksums and (found := _checksums(self.copy.rows)) != checksums:
            broken = [page for page, is_, was in zip(self.pages, found, checksums, strict=True) if is_ != was]
            raise TransferError(
                f"ticket {self.ticket.number}: what came for pages {shown(broken)} is not what was sent"
            )
        self.store.write(self.pages, self.copy.rows)


class StagedTarget:
    """The end of a decode engine: copies pages out of the segments that sources have made for it.

    Belongs to one thread. All errors are `TransferError`s, and a call that raises one has written no page; but for
    `EngineDeadError` if the device is lost. A ticket is checked in full before it is used: it may be late, or forged.
    """

    def __init__(self, store: PageStore, segments: Segments) -> None:
        self.store = store
        self.segments, self.device_segments = segments, segments.on_device(store.device)
        self.tracer = Tracer()  # that of the engine, once it has a side
        self._sources: dict[str, Incoming] = {}

    @property
    def readable(self) -> tuple[str, ...]:
        """UUIDs of the GPUs whose memory this end can read."""
        return () if self.device_segments is None else self.device_segments.readable

    def map(self, source: str, ticket: Ticket, memory: DeviceSegment | None = None) -> None:
        """Map the segment of a ticket, if it is not mapped; also for a ticket that is not wanted, because the source
        removes the segment's name with its release. Raises unless it has the ticket's number of this store's pages.

        `memory`: of an offer, whose segment is in GPU memory.
        """
        known = self._sources.get(source)
        if known is not None and known.segment == ticket.segment:
            return
        num_bytes = ticket.num_frames * self.store.page_bytes
        unlock: Callable[[], object] = nothing
        if memory is None:
            mapped = self.segments.open(ticket.segment, num_bytes)
            unlock, problem = page_lock(mapped, self.store.device, is_read_only=True)
            if problem:
                self.tracer.emit(PathChosen, peer=source, path="host memory", why=problem)
        elif self.device_segments is None:
            raise TransferError(NO_SHARED_GPU)
        else:
            mapped = self.device_segments.open(memory, num_bytes)
        self.forget(source)
        self._sources[source] = Incoming(ticket.segment, mapped.view(ticket.num_frames, -1), unlock)

    def receive(self, source: str, ticket: Ticket, pages: Sequence[int]) -> Arrival:
        """Begin to copy the frames of a ticket, for these pages, in order. When the copy is done, the source may
        release the ticket, and the owner of the pages may `write` them.

        The numbers of one source's tickets must rise, since the frames of an old ticket may hold other pages. Raises
        also for frames or pages that do not exist, and pages that are named twice.
        """
        self.map(source, ticket)
        incoming = self._sources[source]
        if ticket.number <= incoming.last_number:
            raise TransferError(f"ticket {ticket.number} comes after {incoming.last_number}: late, or twice")
        rows = incoming.memory[ticket.first_frame : ticket.first_frame + len(pages)]
        if len(rows) != len(pages) or len(ticket.checksums) not in (0, len(pages)):
            raise TransferError(
                f"ticket {ticket.number}: {len(pages)} pages from frame {ticket.first_frame} on, of "
                f"{len(incoming.memory)} frames, with {len(ticket.checksums)} checksums"
            )
        self.store.check_pages(pages)
        copy = self.store.fetch(rows)
        incoming.last_number = ticket.number
        return Arrival(self.store, ticket, pages, copy)

    def forget(self, source: str) -> None:
        """Unmap the segment of a source that is lost, when nothing is copied from it any more. Pages that were received
        stay. No effect if it is unknown."""
        incoming = self._sources.pop(source, None)
        if incoming is not None:
            self.store.wait()
            incoming.unlock()

    def close(self) -> None:
        """Unmap all segments."""
        for source in list(self._sources):
            self.forget(source)


def _checksums(rows: Tensor) -> tuple[int, ...]:
    return tuple(zlib.crc32(row) for row in rows.cpu().numpy())
