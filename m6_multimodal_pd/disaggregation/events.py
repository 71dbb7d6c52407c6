"""Events of a group of engines: requests routed, KV transferred and taken over, engines joined, refused and lost."""

from dataclasses import dataclass
from typing import ClassVar, Self

from m1_single_request.trace_event import Event, size, some, volatile
from m4_radix_cache.mem_cache.events import listed
from m5_chunked_prefill_spec.events import Batch as PlainBatch
from m6_multimodal_pd.disaggregation.runtime.messages import Joined


@dataclass(frozen=True, kw_only=True)
class KVPollChanged(Event):
    """The state of a transfer changed on one side."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    room: int
    """Number of the transfer, the same on both sides."""
    side: str
    """`prefill` or `decode`."""
    old: str
    """The state before, a name of `KVPoll`."""
    new: str
    """The state after it."""
    why: str
    """The cause."""

    def explain(self) -> str:
        return f"Room {self.room} ({self.rid}), {self.side} side: {_words(self.old)} -> {_words(self.new)}: {self.why}."


def _words(state: str) -> str:
    return state.replace("_", " ").lower()


@dataclass(frozen=True, kw_only=True)
class PathChosen(Event):
    """The memory between this engine and another one, through which KV goes."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    peer: str
    """Name of the other engine."""
    path: str
    """`GPU memory` or `host memory`."""
    why: str
    """The cause, with the error if the memory is slower than it could be."""

    def explain(self) -> str:
        return f"KV between this engine and {self.peer} goes through {self.path}: {self.why}."


@dataclass(frozen=True, kw_only=True)
class ChunkSent(Event):
    """A chunk of pages is ready for another engine."""

    style: ClassVar[str] = "bold blue"
    rid: str
    """Request id."""
    room: int
    """Number of the transfer."""
    number: int
    """Index of the chunk in its transfer."""
    to: str
    """The engine that reads the pages."""
    first_page: int
    """Index of the first page in the prompt."""
    num_pages: int
    """Number of pages."""
    num_bytes: int
    """Their size."""
    is_last: bool
    """True for the last chunk of the transfer."""
    seconds: float = volatile()
    """Time from the beginning of copying them until they were found there."""

    def brief(self) -> str:
        return f"sent: {some(self.num_pages, 'page')} of {self.rid}"

    def explain(self) -> str:
        speed = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        behind = "the last ones" if self.is_last else "more will come"
        return (
            f"{some(self.num_pages, 'page')} of {self.rid}, from page {self.first_page} on, lie ready for {self.to}: "
            f"{size(self.num_bytes)} in {self.seconds * 1e3:.2f} ms ({speed:.1f} GB/s); {behind}."
        )


@dataclass(frozen=True, kw_only=True)
class ChunkReceived(Event):
    """A chunk of pages of another engine was copied into the KV memory."""

    style: ClassVar[str] = "bold blue"
    rid: str
    """Request id."""
    room: int
    """Number of the transfer."""
    number: int
    """Index of the chunk in its transfer."""
    origin: str
    """The engine that sent the pages."""
    pages: tuple[int, ...]
    """The pages that hold them now."""
    num_bytes: int
    """Their size."""
    seconds: float = volatile()
    """Time from the beginning of copying them until they were found there."""

    def brief(self) -> str:
        return f"received: {some(len(self.pages), 'page')} of {self.rid}"

    def explain(self) -> str:
        speed = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"{some(len(self.pages), 'page')} of {self.rid} came from {self.origin}: {size(self.num_bytes)} in "
            f"{self.seconds * 1e3:.2f} ms ({speed:.1f} GB/s)."
        )


@dataclass(frozen=True, kw_only=True)
class RoomTaken(Event):
    """A decode engine has taken memory for a prompt that another engine computes."""

    style: ClassVar[str] = "blue"
    rid: str
    """Request id."""
    room: int
    """Number of the transfer, the same on both sides."""
    num_tokens: int
    """Number of prompt tokens."""
    num_cached: int
    """Number of those that are cached on this engine, and are not sent."""
    num_pages: int
    """Number of pages to come."""
    origin: str
    """The engine that computes it."""

    def explain(self) -> str:
        cached = f" {self.num_cached} tokens are cached here and are not sent." if self.num_cached else ""
        return (
            f"There is room for the {some(self.num_tokens, 'token')} of {self.rid}: {some(self.num_pages, 'page')} may "
            f"come from {self.origin}.{cached}"
        )


@dataclass(frozen=True, kw_only=True)
class Batch(PlainBatch):
    """A batch of a decode engine. `mode` may also be `prebuilt`: another engine has computed these prompts."""

    def brief(self) -> str:
        return f"arrived: {listed(self.rids)}" if self.mode == "prebuilt" else super().brief()

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple((rid, "arrived") for rid in self.rids) if self.mode == "prebuilt" else super().lanes()

    def explain(self) -> str:
        if self.mode != "prebuilt":
            return super().explain()
        left = f" Since the last batch left: {', '.join(self.left)}." if self.left else ""
        return f"No forward for {listed(self.rids)}: another engine has computed prompt and first token.{left}"


@dataclass(frozen=True, kw_only=True)
class RequestRouted(Event):
    """The router has chosen the engines of a request: one for its prompt and one for its answer, or one for both."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    room: int
    """Number of this attempt, the same on its engines."""
    prefill: str
    """The engine that computes the prompt."""
    decode: str
    """The engine that answers."""
    attempt: int
    """1 for the first; more after an engine was lost, or a transfer failed."""
    num_output_tokens: int
    """Number of output tokens of earlier attempts."""

    def explain(self) -> str:
        again = f" (attempt {self.attempt}, behind {some(self.num_output_tokens, 'token')})" if self.attempt > 1 else ""
        if self.prefill == self.decode:
            return f"{self.rid} goes to {self.decode}{again}."
        return f"{self.rid} goes to {self.prefill} for its prompt, and to {self.decode} for its answer{again}."


@dataclass(frozen=True, kw_only=True)
class EngineJoined(Event):
    """An engine is ready for requests."""

    headline: ClassVar[bool] = True
    style: ClassVar[str] = "bold"
    name: str
    """Its name."""
    role: str
    """`prefill` or `decode`."""
    total_tokens: int
    """Size of its KV memory, in tokens."""
    page_size: int
    """Tokens of a page."""
    max_model_len: int
    """Limit of prompt and output together, in tokens: the same for all engines of a group."""

    @classmethod
    def of(cls, name: str, joined: Joined) -> Self:
        """Build the event for an engine that has joined."""
        return cls(
            name=name,
            role=joined.role,
            total_tokens=joined.total_tokens,
            page_size=joined.page_size,
            max_model_len=joined.max_model_len,
        )

    def explain(self) -> str:
        return (
            f"Engine {self.name} joins, for {self.role}: KV memory for {self.total_tokens:,} tokens in pages of "
            f"{self.page_size}, and requests of at most {self.max_model_len:,}."
        )


@dataclass(frozen=True, kw_only=True)
class EngineRefused(Event):
    """An engine may not join, because it differs from the others."""

    style: ClassVar[str] = "bold red"
    name: str
    """Its name."""
    role: str
    """`prefill` or `decode`."""
    why: str
    """The difference."""

    def explain(self) -> str:
        return f"Engine {self.name} may not join, for {self.role}: {self.why}."


@dataclass(frozen=True, kw_only=True)
class EngineLost(Event):
    """An engine is lost: it has ended, failed or stopped answering."""

    style: ClassVar[str] = "bold red"
    name: str
    """Its name."""
    why: str
    """The cause."""
    rids: tuple[str, ...]
    """Ids of the requests that it had."""

    def explain(self) -> str:
        had = f"it had {', '.join(self.rids)}" if self.rids else "it had no requests"
        return f"Engine {self.name} is lost: {self.why}; {had}."


@dataclass(frozen=True, kw_only=True)
class Reported(Event):
    """An event of another engine's trace."""

    engine: str
    """Name of the engine."""
    its_step: int
    """Step of that engine."""
    what: str
    """The event's kind."""
    rids: tuple[str, ...]
    """Ids of the requests that it is about."""
    text: str = volatile()
    """Its `explain()`."""
    facts: tuple[tuple[str, int | str | tuple[int | str, ...]], ...]
    """Those of its fields that are integers or short strings, or tuples of these, by name."""

    def explain(self) -> str:
        return f"On {self.engine}, step {self.its_step}: {self.text}"
