"""What the trace can say about pictures: what came, what the tower made of it or need not make, where it stands.

All other events are those of m1 to m5. A picture is named by the first letters of its content's hash, the same name
wherever it comes again.
"""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event, size, some, volatile

HASH_LETTERS = 8


def named(content: str) -> str:
    """A content as people are told of it."""
    return content[:HASH_LETTERS]


@dataclass(frozen=True, kw_only=True)
class ItemReceived(Event):
    """A request brings an image or a video."""

    style: ClassVar[str] = "magenta"
    rid: str
    """Request id."""
    index: int
    """Its place among the request's items, from 0."""
    modality: str
    """`image` or `video`."""
    size: tuple[int, int]
    """Width and height as handed in, in pixels."""
    grid_thw: tuple[int, int, int]
    """Patches along time, height and width, after resizing."""
    num_tokens: int
    """Placeholders in the prompt, and embeddings."""
    offsets: tuple[tuple[int, int], ...]
    """Where they stand in the prompt: first, and behind the last; a range for each frame of a video."""
    hash: str
    """sha256 of its content."""
    pad_value: int | None
    """What stands for each of its placeholders in the prefix cache."""

    def brief(self) -> str:
        return f"{self.modality} of {self.rid}: {some(self.num_tokens, 'token')}"

    def explain(self) -> str:
        frames, rows, columns = self.grid_thw
        patches = f"{frames} x {rows} x {columns}" if self.modality == "video" else f"{rows} x {columns}"
        return (
            f"{self.rid} brings {self.modality} {self.index}, {self.size[0]} x {self.size[1]} pixels: {patches} "
            f"patches, merged to {some(self.num_tokens, 'token')} from place {self.offsets[0][0]:,} on. Content "
            f"{named(self.hash)}, which the prefix cache knows as token {self.pad_value:,}."
        )


@dataclass(frozen=True, kw_only=True)
class PositionsAssigned(Event):
    """Where the tokens of a prompt with pictures stand: on each axis, one range for each image or frame."""

    style: ClassVar[str] = "dim magenta"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    num_tokens: int
    """Tokens of the prompt."""
    times: tuple[tuple[int, int], ...]
    """Lowest and highest position in time of each range of placeholders."""
    heights: tuple[tuple[int, int], ...]
    """The same in height."""
    widths: tuple[tuple[int, int], ...]
    """The same in width."""
    delta: int
    """By how much the position of the first answered token exceeds its place: never more than 0."""

    def explain(self) -> str:
        blocks = [
            f"time {_range(t)}, height {_range(h)}, width {_range(w)}"
            for t, h, w in zip(self.times, self.heights, self.widths, strict=True)
        ]
        more = f"; and {len(blocks) - 3} more" if len(blocks) > 3 else ""
        return (
            f"Positions of {self.rid}: {'; '.join(blocks[:3])}{more}. Its {some(self.num_tokens, 'token')} end at "
            f"position {self.num_tokens + self.delta - 1:,}: the answer goes on at {self.num_tokens + self.delta:,}."
        )


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


@dataclass(frozen=True, kw_only=True)
class EncoderRun(Event):
    """The vision tower makes embeddings of some items, of all requests of the step at once."""

    style: ClassVar[str] = "bold magenta"
    rids: tuple[str, ...]
    """Requests that use them now."""
    hashes: tuple[str, ...]
    """Their contents."""
    num_tokens: int
    """Embeddings made."""
    num_patches: int
    """Patches read."""
    budget: int
    """How many embeddings a step may make."""
    milliseconds: float = volatile()
    """What it took."""

    def brief(self) -> str:
        made = f"{some(len(self.hashes), 'item')}, {some(self.num_tokens, 'token')}"
        return f"encoded for {', '.join(self.rids)}: {made}"

    def explain(self) -> str:
        names = ", ".join(named(content) for content in self.hashes)
        return (
            f"The vision tower encodes {names} for {', '.join(self.rids)} in one pass: {self.num_patches:,} patches to "
            f"{some(self.num_tokens, 'embedding')}, of at most {self.budget:,} a step, in {self.milliseconds:.1f} ms."
        )


@dataclass(frozen=True, kw_only=True)
class EncoderHit(Event):
    """The embeddings of an item are there already."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    hash: str
    """Its content."""
    num_tokens: int
    """Embeddings."""
    num_read: int
    """Those that this step reads: fewer, if a piece of the prompt ends inside the item, or a cache hit does."""

    def brief(self) -> str:
        return f"encoder hit: {self.rid}"

    def explain(self) -> str:
        part = "the" if self.num_read == self.num_tokens else f"{self.num_read:,} of the"
        return (
            f"{self.rid} finds {named(self.hash)} encoded already, and reads {part} {self.num_tokens:,} embeddings: "
            f"the tower does not run for it."
        )


@dataclass(frozen=True, kw_only=True)
class ItemEvicted(Event):
    """An item's embeddings left the cache, because another one needed the room."""

    style: ClassVar[str] = "yellow"
    hash: str
    """Its content."""
    num_tokens: int
    """Embeddings."""
    num_bytes: int
    """Their memory."""
    used_bytes: int
    """What all others take."""

    def explain(self) -> str:
        return (
            f"The embeddings of {named(self.hash)} leave the cache ({some(self.num_tokens, 'embedding')}, "
            f"{size(self.num_bytes)}): nobody uses them now, and they were used least recently. "
            f"{size(self.used_bytes)} stay."
        )
