"""How KV pages get from a prefill engine to a decode engine: the two ends, and what one tells the other.

Up to m5 an engine had its KV to itself. The ends below move pages; they know nothing of requests, and send no message
themselves: an `Offer` and a `Ticket` travel with the engines' other messages, typed, checked and never pickled.

    prefill engine, a KVSource                             decode engine, a KVTarget
        offer(target)            ---- Offer ---->              accept(source, offer)
        taken(target)            <-- "accepted" --
        send(target, pages)      ---- Ticket --->              receive(source, ticket, its own pages)
        release(target, number)  <--- number ----

There is one source per prefill engine and one target per decode engine, each with as many partners as there are, known
by names that the engines agree upon. An end belongs to one thread. vLLM: `nixl_connector.py` in
`distributed/kv_transfer/kv_connector/v1/`, where the decode engine reads; SGLang: `BaseKVManager`, `BaseKVSender` and
`BaseKVReceiver` in `disaggregation/base/conn.py`, where the prefill engine writes (`disaggregation/mooncake/conn.py`).
There an object per request moves KV and keeps the request's state; here the state is somebody else's.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from m6_multimodal_pd.disaggregation.runtime.frames import Extent


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory that a source has made for a target."""

    segment: str
    """Its name, if it has one."""
    num_frames: int
    """Pages that it holds at a time."""
    page_bytes: int
    layout: str
    """What the bytes of a page mean."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages that lie ready for a target, in the order in which the source named them."""

    number: int
    """Rises from ticket to ticket, and is never used again."""
    extents: tuple[Extent, ...]
    """The frames that they lie in."""
    checksums: tuple[int, ...] = ()
    """`zlib.crc32` of each page, if the source was told to make them."""


class KVSource(Protocol):
    """The end of a prefill engine. All errors are `TransferError`s, and whatever raises one changed nothing."""

    @property
    def num_frames(self) -> int:
        """The most pages that one `send` takes, and that can be on their way to one target."""
        ...

    @property
    def num_pages_sent(self) -> int:
        """Pages that were sent so far, to all targets."""
        ...

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of these pages."""
        ...

    def offer(self, target: str) -> Offer:
        """Make memory for this target. It is an error if the target has some, or if there is none to be had."""
        ...

    def taken(self, target: str) -> None:
        """The target has accepted the offer, so that nobody else can any more. An error for an unknown target, or if
        it has said so before."""
        ...

    def send(self, target: str, pages: Sequence[int]) -> Ticket | None:
        """Copy these pages for the target; once this returns they may change. None: not all of them have room now, so
        ask again after a `release`.

        It is an error if they never have room (split them into pieces of `num_frames`), if there is no such page, or no
        such target.
        """
        ...

    def release(self, target: str, number: int) -> None:
        """The target has read the pages of this ticket. A number that is not on its way is an error of the target."""
        ...

    def forget(self, target: str) -> None:
        """The target is lost, or was never there: give up its memory and whatever is on its way to it."""
        ...

    def close(self) -> None:
        """Forget all targets. May be called again, but no memory is offered any more."""
        ...


class KVTarget(Protocol):
    """The end of a decode engine. All errors are `TransferError`s, and whatever raises one changed nothing.

    What comes from a source is checked in full before it is used: it may be of another model, or made up.
    """

    def accept(self, source: str, offer: Offer) -> None:
        """Map the memory that this source offers. It is an error if the offer does not fit this engine or the memory,
        or if the source has been accepted before."""
        ...

    def receive(self, source: str, ticket: Ticket, pages: Sequence[int]) -> None:
        """Copy what the ticket stands for into these pages, in their order; then the source may be told to release it.

        Tickets of one source come in the order of their numbers, each once; some may be left out. Anything else is an
        error, for the frames of an old ticket may hold other pages by now. So are frames that do not exist or are named
        twice, another number of pages, pages that do not exist or are named twice, and wrong checksums.
        """
        ...

    def forget(self, source: str) -> None:
        """The source is lost, or was never there: give up its memory. Pages that were received stay as they are."""
        ...

    def close(self) -> None:
        """Forget all sources."""
        ...
