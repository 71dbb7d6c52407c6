"""Both ends of the KV transport: pages are copied into frames of memory that both engines map, and out again.

    prefill engine, a StagedSource                         decode engine, a StagedTarget
        send(target, pages)      ---- Ticket --->              receive(source, ticket, its own pages)
        release(target, number)  <--- number ----

Up to m5 an engine has its KV alone. The two ends move pages and know no requests; they send no messages themselves: a
`Ticket` travels with the other messages of the engines (`runtime/messages.py`). There is one source per prefill engine
and one target per decode engine, each with several partners, known by the names of the engines. The transports differ
only in the origin of the memory, a `Segments`. A source makes one segment for each target, with the first pages that it
sends, so that the frames of other targets outlive a target that dies, and a late message about an old segment cannot
touch a new one. Each page is copied twice, so that no engine maps the KV memory of another one. New in this milestone.
SGLang: the staging buffers in `disaggregation/common/staging_handler.py`; vLLM: the host buffer of `nixl_connector.py`
(`kv_buffer_device="cpu"`). There one object per request moves KV and keeps the state of the request; here `poll.py`
keeps the state.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from torch import Tensor

from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import PositiveInt, valid
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.runtime.frames import Frames
from m6_multimodal_pd.disaggregation.runtime.messages import Ticket
from m6_multimodal_pd.errors import TransferError


class Segments(Protocol):
    """Memory that two engines map. A segment lives as long as a tensor of it does, on either side."""

    def create(self, num_bytes: int) -> tuple[str, Tensor]:
        """Return new memory, uint8 `[num_bytes]`, and the name that opens it. Raises `TransferError`."""
        ...

    def open(self, name: str, num_bytes: int) -> Tensor:
        """Return the memory of that name and exactly that size, to be read. Raises `TransferError` for other names."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name, so that the memory cannot be opened again. No effect for a name that is removed."""
        ...


@dataclass
class Outgoing:
    """The segment of a source for one target."""

    segment: str
    memory: Tensor  # [num_frames, page_bytes]
    frames: Frames
    is_linked: bool = True


@dataclass
class Incoming:
    """The segment that a target has from one source."""

    segment: str
    memory: Tensor  # [num_frames, page_bytes]
    last_number: int = -1


class StagedSource:
    """The end of a prefill engine: copies pages into segments, one of `num_frames` frames for each target.

    Belongs to one thread. All errors are `TransferError`s; a call that raises one has changed no frame.
    """

    def __init__(self, store: PageStore, segments: Segments, *, num_frames: int, checksums: bool = False) -> None:
        """`checksums`: make one of each page, to find wrong writes."""
        self.store = store
        self.segments = segments
        self.num_frames: int = valid("num_frames", num_frames, PositiveInt, ConfigError)
        self.checksums = checksums
        self.targets: dict[str, Outgoing] = {}
        """By name of the decode engine."""
        self._numbers = count()  # for all targets: no number is used twice

    def send(self, target: str, pages: Sequence[int]) -> Ticket | None:
        """Copy pages into free frames, which the ticket holds from then on; the pages may change afterwards.

        None: there are not enough free frames side by side; try again after a `release`. Raises for more pages than
        frames, a page that does not exist, and if there is no memory for the segment of a new target.
        """
        if len(pages) > self.num_frames:
            raise TransferError(f"{len(pages)} pages are sent at once, and there are {self.num_frames} frames: split")
        self.store.check_pages(pages)
        if target not in self.targets:
            segment, memory = self.segments.create(self.num_frames * self.store.page_bytes)
            self.targets[target] = Outgoing(segment, memory.view(self.num_frames, -1), Frames(self.num_frames))
        outgoing = self.targets[target]
        frames = outgoing.frames.find(len(pages))
        if frames is None:
            return None
        rows = outgoing.memory[frames.start : frames.stop]
        self.store.read(pages, rows)
        checksums = _checksums(rows) if self.checksums else ()
        ticket = Ticket(next(self._numbers), outgoing.segment, self.num_frames, frames.start, checksums)
        outgoing.frames.hold(ticket.number, frames)  # last: a failed copy holds no frame
        return ticket

    def release(self, target: str, number: int) -> None:
        """Free the frames of this ticket, and with the first one remove the segment's name: the target has mapped it,
        or never will (then `forget` it). Raises for a number that is not in transit."""
        outgoing = self.targets.get(target)
        if outgoing is None or not outgoing.frames.free(number):
            raise TransferError(f"target {shown(target)} releases {shown(number)}, which is not in transit to it")
        self._unlink(outgoing)

    def forget(self, target: str) -> None:
        """Drop the segment of a target that is lost, with all its frames. No effect for an unknown target."""
        outgoing = self.targets.pop(target, None)
        if outgoing is not None:
            self._unlink(outgoing)

    def close(self) -> None:
        """Drop all segments."""
        for target in list(self.targets):
            self.forget(target)

    def check_invariants(self) -> None:
        """Raise AssertionError if a frame is held twice, or one that does not exist; tests call it after each step."""
        for outgoing in self.targets.values():
            outgoing.frames.check_invariants()

    def _unlink(self, outgoing: Outgoing) -> None:
        if outgoing.is_linked:
            self.segments.unlink(outgoing.segment)
            outgoing.is_linked = False


class StagedTarget:
    """The end of a decode engine: copies pages out of the segments that sources have made for it.

    Belongs to one thread. All errors are `TransferError`s; a call that raises one has written no page. A ticket is
    checked in full before it is used: it may be late, or forged.
    """

    def __init__(self, store: PageStore, segments: Segments) -> None:
        self.store = store
        self.segments = segments
        self._sources: dict[str, Incoming] = {}

    def map(self, source: str, ticket: Ticket) -> None:
        """Map the segment of a ticket, if it is not mapped; also for a ticket that is not wanted, because the source
        removes the segment's name with its release. Raises unless it has the ticket's number of this store's pages."""
        known = self._sources.get(source)
        if known is None or known.segment != ticket.segment:
            memory = self.segments.open(ticket.segment, ticket.num_frames * self.store.page_bytes)
            self._sources[source] = Incoming(ticket.segment, memory.view(ticket.num_frames, -1))

    def receive(self, source: str, ticket: Ticket, pages: Sequence[int]) -> None:
        """Copy the frames of a ticket into these pages, in order; then the source may release it.

        The numbers of one source's tickets must rise, since the frames of an old ticket may hold other pages. Raises
        also for frames or pages that do not exist, pages that are named twice, and wrong checksums.
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
        if ticket.checksums and (found := _checksums(rows)) != ticket.checksums:
            broken = [page for page, is_, was in zip(pages, found, ticket.checksums, strict=True) if is_ != was]
            raise TransferError(f"ticket {ticket.number}: what came for pages {shown(broken)} is not what was sent")
        self.store.write(pages, rows)
        incoming.last_number = ticket.number

    def forget(self, source: str) -> None:
        """Unmap the segment of a source that is lost. Pages that were received stay. No effect if it is unknown."""
        self._sources.pop(source, None)

    def close(self) -> None:
        """Unmap all segments."""
        self._sources.clear()


def _checksums(rows: Tensor) -> tuple[int, ...]:
    return tuple(zlib.crc32(row) for row in rows.numpy())
