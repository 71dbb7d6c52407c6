"""Events about images: awaited, received, positions assigned, encoded, found encoded, evicted; and about CUDA graphs.

All other events are those of m1 to m5. In a sentence, an image is named by the first letters of its content's hash:
the same content has the same name in every request. `of` takes an object of `multimodal/` as `Any`, because its file
imports this one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, size, some, volatile

HASH_LETTERS = 8


def named(content: str) -> str:
    """Return the short name of a content."""
    return content[:HASH_LETTERS]


@dataclass(frozen=True, kw_only=True)
class MediaAwaited(Event):
    """A request was accepted, and waits for its images, which other processes read. `request_added` follows."""

    style: ClassVar[str] = "magenta"
    rid: str
    """Request id."""
    num_items: int
    """Number of its images and videos."""

    def explain(self) -> str:
        return f"{self.rid} waits in front of the queue until another process has read {some(self.num_items, 'item')}."


@dataclass(frozen=True, kw_only=True)
class MediaProcessLost(Event):
    """A process that reads images is lost, and was ended. The next image that waits starts another one."""

    style: ClassVar[str] = "red"
    what: str | None
    """The image that it had; None if it had none."""
    cause: str
    """Why it was ended, or what it failed to do."""
    status: int | None
    """Its exit status; minus the number of a signal that has killed it. None if it does not end."""

    def explain(self) -> str:
        item = "" if self.what is None else f", with {self.what}"
        return f"A process that reads images is lost{item}: {self.cause} (status {self.status})."


@dataclass(frozen=True, kw_only=True)
class ItemReceived(Event):
    """A request with an image or a video was added; one event for each item."""

    style: ClassVar[str] = "magenta"
    rid: str
    """Request id."""
    index: int
    """Index among the request's items."""
    modality: str
    """`image` or `video`."""
    size: tuple[int, int]
    """Width and height before resizing, in pixels."""
    grid_thw: tuple[int, int, int]
    """Patches along time, height and width, after resizing."""
    num_tokens: int
    """Number of its placeholders in the prompt, and of its embeddings."""
    offsets: tuple[tuple[int, int], ...]
    """Ranges `[start, end)` of the placeholders in the prompt: one for an image, one for each frame of a video."""
    hash: str
    """sha256 of its content."""
    pad_value: int | None
    """Token id of its placeholders in the prefix cache."""

    def brief(self) -> str:
        return f"{self.modality} of {self.rid}: {some(self.num_tokens, 'token')}"

    def explain(self) -> str:
        frames, rows, columns = self.grid_thw
        patches = f"{frames} x {rows} x {columns}" if self.modality == "video" else f"{rows} x {columns}"
        return (
            f"{self.rid} brings {self.modality} {self.index}, {self.size[0]} x {self.size[1]} pixels: {patches} "
            f"patches, merged to {some(self.num_tokens, 'token')} from place {self.offsets[0][0]:,} on. Content "
            f"{named(self.hash)}, whose pad value in the prefix cache is {self.pad_value:,}."
        )


@dataclass(frozen=True, kw_only=True)
class PositionsAssigned(Event):
    """The tokens of a prompt with images got positions: on each axis, one range for each image or frame."""

    style: ClassVar[str] = "dim magenta"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    num_tokens: int
    """Tokens of the prompt."""
    starts: tuple[int, ...]
    """Index of the first placeholder of each range. The text before and after it counts up on all axes."""
    times: tuple[tuple[int, int], ...]
    """Lowest and highest position in time of each range of placeholders."""
    heights: tuple[tuple[int, int], ...]
    """The same in height."""
    widths: tuple[tuple[int, int], ...]
    """The same in width."""
    delta: int
    """Position of the first output token minus its index in prompt and output: at most 0."""

    @classmethod
    def of(cls, rid: str, inputs: Any) -> Self:
        """Build the event for a request's `MultimodalInputs`."""
        positions = inputs.mrope_positions
        offsets = [each for item in inputs.mm_items for each in item.offsets]
        blocks = [positions[:, start:end] for start, end in offsets]
        times, heights, widths = (tuple((int(b[i].min()), int(b[i].max())) for b in blocks) for i in range(3))
        return cls(
            rid=rid,
            num_tokens=positions.shape[1],
            starts=tuple(start for start, _ in offsets),
            times=times,
            heights=heights,
            widths=widths,
            delta=inputs.mrope_position_delta,
        )

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
    """The vision tower computed the embeddings of some items, for all requests of the step in one pass."""

    style: ClassVar[str] = "bold magenta"
    rids: tuple[str, ...]
    """Ids of the requests that use them in this step."""
    hashes: tuple[str, ...]
    """sha256 of each content."""
    num_tokens: int
    """Number of embeddings made."""
    num_patches: int
    """Number of patches read."""
    budget: int
    """Maximum number of embeddings made in a step."""
    milliseconds: float = volatile()
    """Time of the pass."""

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
    """A request found the embeddings of an item computed already."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    hash: str
    """sha256 of its content."""
    num_tokens: int
    """Number of its embeddings."""
    num_read: int
    """Number of those that this step reads: fewer if a piece of the prompt, or a cache hit, ends inside the item."""

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
    """The embeddings of an item were evicted from the embedding cache, to make room for another item."""

    style: ClassVar[str] = "yellow"
    rid: str | None
    """Id of the request whose item needs the room; None: the cache was called for no request."""
    hash: str
    """sha256 of its content."""
    num_tokens: int
    """Number of its embeddings."""
    num_bytes: int
    """Their size."""
    used_bytes: int
    """Size of the embeddings that stay."""

    def explain(self) -> str:
        item = f" for an item of {self.rid}" if self.rid else ""
        return (
            f"The embeddings of {named(self.hash)} ({some(self.num_tokens, 'embedding')}, {size(self.num_bytes)}) are "
            f"evicted{item}: this step does not read them, and they were used least recently. "
            f"{size(self.used_bytes)} stay."
        )


@dataclass(frozen=True, kw_only=True)
class GraphsCaptured(Event):
    """The steps of a model with few tokens were captured as CUDA graphs, one for each number of tokens."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    model: str
    """`target` or `draft`."""
    decode_sizes: tuple[int, ...]
    """Numbers of rows of the decodes, ascending. A batch runs in the smallest one that holds it."""
    verify_sizes: tuple[int, ...]
    """Numbers of tokens of the verifications of drafts, ascending; none for a model that verifies none."""
    num_bytes: int = volatile()
    """GPU memory of the graphs, with their inputs and output."""
    milliseconds: float = volatile()
    """Time of warm-up and capture."""

    @classmethod
    def of(cls, model: str, runner: Any, milliseconds: float) -> Self:
        """Build the event for a `GraphRunner`."""
        return cls(
            model=model,
            decode_sizes=tuple(runner.sizes[1]),
            verify_sizes=tuple(runner.sizes[runner.limits.width]) if runner.limits.width > 1 else (),
            num_bytes=runner.num_bytes,
            milliseconds=milliseconds,
        )

    def explain(self) -> str:
        what = f"decodes of up to {some(self.decode_sizes[-1], 'row')} in {some(len(self.decode_sizes), 'size')}"
        if self.verify_sizes:
            most = some(self.verify_sizes[-1], "token")
            what += f", verifications of up to {most} in {some(len(self.verify_sizes), 'size')}"
        return (
            f"CUDA graphs of the {self.model} model: {what}. They take {size(self.num_bytes)}; warm-up and capture "
            f"took {self.milliseconds:,.0f} ms."
        )


@dataclass(frozen=True, kw_only=True)
class GraphsUnavailable(Event):
    """The steps of a model could not be captured as CUDA graphs: all of them run eagerly."""

    style: ClassVar[str] = "yellow"
    model: str
    """`target` or `draft`."""
    reason: str
    """The error of the capture, or the property of the backend that prevents it."""

    def explain(self) -> str:
        return f"Steps of the {self.model} model launch their kernels one by one, without CUDA graphs: {self.reason}."
