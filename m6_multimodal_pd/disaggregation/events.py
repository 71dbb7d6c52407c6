"""What the trace can say about engines that work together: who hands what to whom, and how far it is."""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event, size, some, volatile


@dataclass(frozen=True, kw_only=True)
class KVPollChanged(Event):
    """A transfer goes from one state to the next, as one side sees it."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    room: int
    """The number under which both sides know the transfer."""
    side: str
    """`prefill` or `decode`."""
    old: str
    """The state before, a name of `KVPoll`."""
    new: str
    """The state now."""
    why: str
    """What has happened."""

    def explain(self) -> str:
        return f"Room {self.room} ({self.rid}), {self.side} side: {_words(self.old)} -> {_words(self.new)}: {self.why}."


def _words(state: str) -> str:
    return state.replace("_", " ").lower()


@dataclass(frozen=True, kw_only=True)
class ChunkSent(Event):
    """Pages lie ready for another engine."""

    style: ClassVar[str] = "bold blue"
    rid: str
    """Request id."""
    room: int
    """Its room."""
    number: int
    """The chunk's, from 0."""
    to: str
    """The engine that reads them."""
    first_page: int
    """Counted from the beginning of the prompt."""
    num_pages: int
    """How many."""
    num_bytes: int
    """What they take."""
    is_last: bool
    """Whether no more come."""
    seconds: float = volatile()
    """What copying them took."""

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
    """Pages of another engine are in their places."""

    style: ClassVar[str] = "bold blue"
    rid: str
    """Request id."""
    room: int
    """Its room."""
    number: int
    """The chunk's, from 0."""
    origin: str
    """The engine that sent them."""
    pages: tuple[int, ...]
    """Where they are now."""
    num_bytes: int
    """What they take."""
    seconds: float = volatile()
    """What copying them took."""

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
    """The number under which both sides know the transfer."""
    num_tokens: int
    """Tokens of the prompt."""
    num_cached: int
    """Those that are cached here, and need not come."""
    num_pages: int
    """Pages to come."""
    origin: str
    """The engine that computes it."""

    def explain(self) -> str:
        cached = f" {self.num_cached} tokens are cached here and are not sent." if self.num_cached else ""
        return (
            f"There is room for the {some(self.num_tokens, 'token')} of {self.rid}: {some(self.num_pages, 'page')} may "
            f"come from {self.origin}.{cached}"
        )


@dataclass(frozen=True, kw_only=True)
class RequestRouted(Event):
    """The router has chosen who computes a prompt, and who answers it."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    room: int
    """The number under which both know it."""
    prefill: str
    """The engine that computes the prompt."""
    decode: str
    """The engine that answers."""
    attempt: int
    """1 for the first; more after an engine was lost, or a transfer failed."""
    num_output_tokens: int
    """Tokens that were said in earlier attempts."""

    def explain(self) -> str:
        again = f" (attempt {self.attempt}, behind {some(self.num_output_tokens, 'token')})" if self.attempt > 1 else ""
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
    """Its KV memory."""
    page_size: int
    """Tokens of a page."""
    max_model_len: int
    """Limit of prompt and output together, in tokens: the same for all engines of a group."""

    def explain(self) -> str:
        return (
            f"Engine {self.name} joins, for {self.role}: KV memory for {self.total_tokens:,} tokens in pages of "
            f"{self.page_size}, and requests of at most {self.max_model_len:,}."
        )


@dataclass(frozen=True, kw_only=True)
class EngineRefused(Event):
    """An engine wants to join, and does not fit."""

    style: ClassVar[str] = "bold red"
    name: str
    """Its name."""
    role: str
    """`prefill` or `decode`."""
    why: str
    """What is different."""

    def explain(self) -> str:
        return f"Engine {self.name} may not join, for {self.role}: {self.why}."


@dataclass(frozen=True, kw_only=True)
class EngineLost(Event):
    """An engine is gone."""

    style: ClassVar[str] = "bold red"
    name: str
    """Its name."""
    why: str
    """How that was noticed."""
    rids: tuple[str, ...]
    """Requests that it had."""

    def explain(self) -> str:
        had = f"it had {', '.join(self.rids)}" if self.rids else "it had no requests"
        return f"Engine {self.name} is lost: {self.why}; {had}."


@dataclass(frozen=True, kw_only=True)
class Reported(Event):
    """What another engine's trace has said: its own events, as it tells them."""

    engine: str
    """The engine's name."""
    its_step: int
    """The step that it belongs to there."""
    what: str
    """The event's kind."""
    rids: tuple[str, ...]
    """Requests that it is about."""
    said: str = volatile()
    """Its own words."""
    facts: tuple[tuple[str, int | str], ...]
    """Those of its fields that are whole numbers or short words, by name."""

    def explain(self) -> str:
        return f"On {self.engine}, step {self.its_step}: {self.said}"
