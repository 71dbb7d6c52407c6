"""Both ends of the KV transport: pages are copied into frames of memory that both engines map, and out again.

The transports differ only in the origin of that memory, a `Segments`. A source makes one segment for each target, so
that the frames of other targets outlive a target that dies, and a late message about an old segment cannot touch a new
one. Each page is copied twice, so that no engine maps the KV memory of another one. New in this milestone.
SGLang: the staging buffers in `disaggregation/common/staging_handler.py`; vLLM: the host buffer of `nixl_connector.py`
(`kv_buffer_device="cpu"`).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from torch import Tensor

from m1_single_request.config import check_whole_number
from m1_single_request.errors import shown
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.runtime.frames import Extent, Frames, fault_of
from m6_multimodal_pd.disaggregation.transport import Offer, Ticket
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

    memory: Tensor  # [num_frames, page_bytes]
    last_number: int = -1


class StagedSource:
    """The end of a prefill engine: copies pages into segments, one of `num_frames` frames for each target.

    Belongs to one thread. All errors are `TransferError`s; a call that raises one has changed nothing.
    """

    def __init__(self, store: PageStore, segments: Segments, *, num_frames: int, checksums: bool = False) -> None:
        """`checksums`: make one of each page, to find wrong writes."""
        check_whole_number("num_frames", num_frames, low=1)
        self.store = store
        self.segments = segments
        self.num_frames = num_frames
        self.checksums = checksums
        self._targets: dict[str, Outgoing] = {}
        self._numbers = count()  # for all targets: no number is used twice
        self._is_closed = False

    def offer(self, target: str) -> Offer:
        """Make a segment for this target, with all frames free. Raises if it has one, or if there is no memory."""
        if self._is_closed:
            raise TransferError("this source was closed")
        if target in self._targets:
            raise TransferError(f"target {shown(target)} has an offer: forget the target first")
        segment, memory = self.segments.create(self.num_frames * self.store.page_bytes)
        self._targets[target] = Outgoing(segment, memory.view(self.num_frames, -1), Frames(self.num_frames))
        return Offer(segment, self.num_frames, self.store.page_bytes, self.store.layout)

    def taken(self, target: str) -> None:
        """Remove the segment's name, since the target has accepted the offer. Raises for an unknown target, or the
        second time."""
        outgoing = self._outgoing(target)
        if not outgoing.is_linked:
            raise TransferError(f"target {shown(target)} has taken its memory before")
        self.segments.unlink(outgoing.segment)
        outgoing.is_linked = False

    def send(self, target: str, pages: Sequence[int]) -> Ticket | None:
        """Copy pages into free frames, which the ticket holds from then on; the pages may change afterwards.

        None: there are too few free frames now; try again after a `release`. Raises for more pages than frames, a page
        that does not exist, and an unknown target.
        """
        outgoing = self._outgoing(target)
        if len(pages) > self.num_frames:
            raise TransferError(f"{len(pages)} pages are sent at once, and there are {self.num_frames} frames: split")
        self.store.check_pages(pages)
        extents = outgoing.frames.find(len(pages))
        if extents is None:
            return None
        checksums: list[int] = []
        for part, rows in _in_parts(pages, extents, outgoing.memory):
            self.store.read(part, rows)
            checksums += _checksums(rows) if self.checksums else []
        ticket = Ticket(next(self._numbers), extents, tuple(checksums))
        outgoing.frames.hold(ticket.number, extents)  # last: a failed copy holds no frame
        return ticket

    def release(self, target: str, number: int) -> None:
        """Free the frames of this ticket: the target has read them. Raises for a number that is not in transit."""
        if not self._outgoing(target).frames.free(number):
            raise TransferError(f"target {shown(target)} releases {shown(number)}, which is not on its way to it")

    def forget(self, target: str) -> None:
        """Drop the segment of a target that is lost, with all its frames. No effect for an unknown target."""
        outgoing = self._targets.get(target)
        if outgoing is not None:
            if outgoing.is_linked:
                self.segments.unlink(outgoing.segment)
            del self._targets[target]

    def close(self) -> None:
        """Drop all segments, and make no more. May be called again."""
        self._is_closed = True
        for target in list(self._targets):
            self.forget(target)

    def check_invariants(self) -> None:
        """Raise AssertionError if a frame is held twice, or one that does not exist; tests call it after each step."""
        for outgoing in self._targets.values():
            outgoing.frames.check_invariants()

    def _outgoing(self, target: str) -> Outgoing:
        if target not in self._targets:
            raise TransferError(f"there is no target {shown(target)}: it was forgotten, or never had an offer")
        return self._targets[target]


class StagedTarget:
    """The end of a decode engine: copies pages out of the segments that sources have made for it.

    Belongs to one thread. All errors are `TransferError`s; a call that raises one has changed nothing. A message of a
    source is checked in full before it is used: it may be of another model, or forged.
    """

    def __init__(self, store: PageStore, segments: Segments) -> None:
        self.store = store
        self.segments = segments
        self._sources: dict[str, Incoming] = {}

    def accept(self, source: str, offer: Offer) -> None:
        """Map the segment of a source. Raises if its pages or its memory do not fit, or if the source was accepted."""
        if source in self._sources:
            raise TransferError(f"source {shown(source)} has been accepted: forget it first")
        ours, theirs = (self.store.layout, self.store.page_bytes), (offer.layout, offer.page_bytes)
        if ours != theirs:
            raise TransferError(f"source {shown(source)} has pages of {shown(theirs)}, here they are {shown(ours)}")
        if offer.num_frames < 1:
            raise TransferError(f"source {shown(source)} offers {shown(offer.num_frames)} frames")
        memory = self.segments.open(offer.segment, offer.num_frames * offer.page_bytes)
        self._sources[source] = Incoming(memory.view(offer.num_frames, -1))

    def receive(self, source: str, ticket: Ticket, pages: Sequence[int]) -> None:
        """Copy the frames of a ticket into these pages, in order; then the source may release it.

        The numbers of one source's tickets must rise, since the frames of an old ticket may hold other pages. Raises
        also for frames or pages that do not exist or are named twice, another number of pages, and wrong checksums.
        """
        incoming = self._sources.get(source)
        if incoming is None:
            raise TransferError(f"there is no source {shown(source)}: it was forgotten, or never accepted")
        self._check(ticket, incoming, len(pages))
        self.store.check_pages(pages)
        if ticket.checksums:
            self._check_sums(ticket, incoming, pages)
        for part, rows in _in_parts(pages, ticket.extents, incoming.memory):
            self.store.write(part, rows)
        incoming.last_number = ticket.number

    def forget(self, source: str) -> None:
        """Unmap the segment of a source that is lost. Pages that were received stay. No effect if it is unknown."""
        self._sources.pop(source, None)

    def close(self) -> None:
        """Unmap all segments."""
        self._sources.clear()

    def _check(self, ticket: Ticket, incoming: Incoming, num_pages: int) -> None:
        """Raise `TransferError` unless the ticket's number, frames and number of pages are valid."""
        number, extents = ticket.number, ticket.extents
        if number <= incoming.last_number:
            raise TransferError(f"ticket {shown(number)} comes after {incoming.last_number}: late, or twice")
        fault = fault_of(extents, len(incoming.memory))
        if fault is not None:
            raise TransferError(f"ticket {shown(number)}: {fault}")
        num_frames = sum(extent.num_frames for extent in extents)
        if num_frames != num_pages or len(ticket.checksums) not in (0, num_pages):
            raise TransferError(
                f"ticket {shown(number)} has {num_frames} pages and {len(ticket.checksums)} checksums, and is for "
                f"{num_pages} pages"
            )

    def _check_sums(self, ticket: Ticket, incoming: Incoming, pages: Sequence[int]) -> None:
        """Raise `TransferError` if a page differs from what was sent."""
        parts = _in_parts(pages, ticket.extents, incoming.memory)
        found = [checksum for _, rows in parts for checksum in _checksums(rows)]
        broken = [page for page, is_, was in zip(pages, found, ticket.checksums, strict=True) if is_ != was]
        if broken:
            raise TransferError(f"ticket {ticket.number}: what came for pages {shown(broken)} is not what was sent")


def _in_parts(
    pages: Sequence[int], extents: Sequence[Extent], memory: Tensor
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield for each extent its pages and its frames, `[count, page_bytes]`."""
    start = 0
    for first, length in extents:
        yield pages[start : start + length], memory[first : first + length]
        start += length


def _checksums(rows: Tensor) -> list[int]:
    return [zlib.crc32(row) for row in rows.numpy()]
