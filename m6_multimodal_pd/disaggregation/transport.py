"""Messages between the two ends of a KV transport: what a prefill engine sends to a decode engine about its pages.

Up to m5 an engine has its KV alone. The two ends (`staging.py`) move pages and know no requests. They send no messages
themselves: an `Offer` and a `Ticket` travel with the other messages of the engines, typed, checked and never pickled.

    prefill engine, a StagedSource                         decode engine, a StagedTarget
        offer(target)            ---- Offer ---->              accept(source, offer)
        taken(target)            <-- "accepted" --
        send(target, pages)      ---- Ticket --->              receive(source, ticket, its own pages)
        release(target, number)  <--- number ----

There is one source per prefill engine and one target per decode engine, each with several partners, known by the names
of the engines. vLLM: `nixl_connector.py` in `distributed/kv_transfer/kv_connector/v1/`, where the decode engine reads;
SGLang: `BaseKVManager`, `BaseKVSender` and `BaseKVReceiver` in `disaggregation/base/conn.py`, where the prefill engine
writes (`disaggregation/mooncake/conn.py`). There one object per request moves KV and keeps the state of the request;
here `poll.py` keeps the state.
"""

import msgspec

from m6_multimodal_pd.disaggregation.runtime.frames import Extent


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory that a source has made for a target."""

    segment: str
    """Name of the memory segment."""
    num_frames: int
    """Number of pages that it holds at a time."""
    page_bytes: int
    layout: str
    """The meaning of the bytes of a page."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages that are ready for a target, in the order in which the source named them."""

    number: int
    """Rises from ticket to ticket, and is never used again."""
    extents: tuple[Extent, ...]
    """The frames that hold the pages."""
    checksums: tuple[int, ...] = ()
    """`zlib.crc32` of each page, if the source makes checksums."""
