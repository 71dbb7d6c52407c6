"""What the trace of m1 can say: every decision of the engine is one typed event.

`explain()` says the decision as a person would. Fields marked volatile (times, floats computed by the model) differ
between machines; `JsonlReader(stable=True)` leaves them out. Later milestones add their events in their own
`events.py`. Events are built only when a reader is attached: the call site tests `if tracer:` first.
"""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event as Event, size as size, some as some, volatile as volatile


@dataclass(frozen=True, kw_only=True)
class EngineStarted(Event):
    """The model is loaded and the engine is ready."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    model: str
    """The directory's name, or the hub id's last part."""
    architecture: str
    """The class of the network."""
    device: str
    """Where the weights lie."""
    dtype: str
    """Precision of weights and KV."""
    named_dtype: str
    """Precision that config.json names."""
    num_parameters: int
    """Tied embeddings count once."""
    weight_bytes: int
    """What a decode step has to read, besides the KV."""
    num_layers: int
    """Layers, each with K and V of its own."""
    num_kv_heads: int
    """Heads that keep keys and values; several query heads share one (GQA)."""
    head_dim: int
    """Length of one head's key or value."""
    kv_bytes_per_token: int
    """K and V of one token over all layers."""
    max_model_len: int
    """Limit of prompt and output together, in tokens."""
    num_positions: int
    """Tokens that the model was made for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer: config, generation config and tokenizer together."""

    def explain(self) -> str:
        is_changed = self.named_dtype == "float16" != self.dtype
        named = " (config.json names float16)" if is_changed else ""
        limit = f" A request has at most {self.max_model_len:,} tokens, of {self.num_positions:,} that the model takes."
        return (
            f"{self.architecture} ({self.model}) is ready on {self.device}: {self.num_parameters / 1e6:,.1f} M "
            f"parameters, {size(self.weight_bytes)} as {self.dtype}{named}. The KV of one token takes 2 (K and V) x "
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} x {self.kv_bytes_per_value} "
            f"bytes = {self.kv_bytes_per_token:,} bytes.{limit if self.max_model_len < self.num_positions else ''}"
        )

    @property
    def kv_bytes_per_value(self) -> int:
        return self.kv_bytes_per_token // (2 * self.num_layers * self.num_kv_heads * self.head_dim)


@dataclass(frozen=True, kw_only=True)
class RequestAdded(Event):
    """A request passed all checks and joined the waiting queue."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    len: int
    """Prompt tokens."""
    max_tokens: int
    """Output tokens it asks for at most."""
    greedy: bool
    """Whether it takes the best token instead of drawing one."""
    seed: int
    """Its own, or derived from the engine's seed and the request's number; a greedy request draws nothing."""
    num_waiting: int
    """Requests before it in the queue."""

    def explain(self) -> str:
        before = f"behind {some(self.num_waiting, 'other')}" if self.num_waiting else "first in line"
        draws = "" if self.greedy else f" Its draws come from seed {self.seed}."
        return (
            f"{self.rid} arrives: {some(self.len, 'prompt token')}, asks for at most {self.max_tokens} more; "
            f"it waits, {before}.{draws}"
        )


@dataclass(frozen=True, kw_only=True)
class Admit(Event):
    """The scheduler moved a request from waiting to running."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    prefix: int
    """Tokens whose KV exists already; always 0 before m4."""
    extend: int
    """Tokens to prefill."""
    num_waiting: int
    """Requests that still wait."""

    def explain(self) -> str:
        others = some(self.num_waiting, "request")
        rest = f"{others} must wait: m1 runs one at a time" if self.num_waiting else "no other waits"
        return f"{self.rid} is admitted with {some(self.extend, 'token')} to prefill; {rest}."


@dataclass(frozen=True, kw_only=True)
class Batch(Event):
    """What goes through the model in this step."""

    style: ClassVar[str] = "bold blue"
    mode: str
    """`prefill` or `decode`."""
    rids: tuple[str, ...]
    """Request ids, one per row of the fields below."""
    extend_lens: tuple[int, ...]
    """New tokens per request."""
    prefix_lens: tuple[int, ...]
    """Tokens per request whose KV is read instead of computed."""
    seq_lens: tuple[int, ...]
    """Tokens per request after this step's forward: prefix plus extend."""

    def explain(self) -> str:
        rid, new, old = self.rids[0], self.extend_lens[0], self.prefix_lens[0]
        if self.mode == "prefill":
            return (
                f"Prefill of {rid}: its {some(new, 'prompt token')} (positions 0 to {new - 1}) go through the model in "
                f"one pass; each weight is read once for all of them."
            )
        return (
            f"Decode of {rid}: only its newest token (position {old}) goes through the model; the keys and values of "
            f"the {some(old, 'token')} before it are read from the cache, not computed again."
        )

    def brief(self) -> str:
        return f"{self.mode:<7} {some(sum(self.extend_lens), 'token')}"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple((rid, self.mode) for rid in self.rids)


@dataclass(frozen=True, kw_only=True)
class Alloc(Event):
    """KV memory grew."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    owner: str
    """Whose memory it is: a request id."""
    tokens: int
    """Tokens added."""
    total_tokens: int
    """Tokens the owner holds now."""
    total_bytes: int
    """The same in bytes."""

    def explain(self) -> str:
        each = self.total_bytes // self.total_tokens
        return (
            f"KV cache of {self.owner}: +{some(self.tokens, 'token')}, now {self.total_tokens:,} x {each:,} bytes = "
            f"{size(self.total_bytes)}."
        )


@dataclass(frozen=True, kw_only=True)
class Free(Event):
    """KV memory was given back."""

    style: ClassVar[str] = "magenta"
    owner: str
    """Whose memory it was: a request id."""
    tokens: int
    """Tokens given back."""
    bytes: int
    """The same in bytes."""

    def explain(self) -> str:
        return f"KV cache of {self.owner} is released: {some(self.tokens, 'token')}, {size(self.bytes)}."


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """How a token was chosen."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    position: int
    """Index among the output tokens."""
    token_id: int
    """The chosen token."""
    text: str
    """The chosen token alone as text."""
    greedy: bool
    """Whether the best token was taken instead of drawing one."""
    settings: str
    """The sampling parameters that act on this row, in the order in which they act; empty for plain greedy."""
    uniform: float | None
    """The row's random number, a function of (seed, position) alone."""
    candidates: tuple[tuple[str, float], ...] = volatile()
    """The model's best tokens and their probabilities before any setting acts."""

    def explain(self) -> str:
        likely = [f"{text!r} {probability:.1%}" for text, probability in self.candidates if probability >= 0.001]
        best = ", ".join(likely) + (", nothing else above 0.1%" if len(likely) < len(self.candidates) else "")
        chosen = f"{self.text!r} (token {self.token_id})"
        if self.greedy:
            how = f"greedy{f' after {self.settings}' if self.settings else ''} takes {chosen}"
        else:
            how = (
                f"{self.settings}: the number {self.uniform:.4f}, fixed by the seed and the place in the answer, falls "
                f"on {chosen}"
            )
        return f"The model's favourites for {self.rid}: {best}. For output {self.position + 1}, {how}."


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """A request received tokens."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    tokens: tuple[int, ...]
    """The new tokens that the stop checker accepted."""
    out_len: int
    """Output tokens so far."""
    max_tokens: int
    """Output tokens it asked for at most."""
    new_text: str
    """The text that became complete with them; joined over the request, the text so far."""

    def explain(self) -> str:
        grows = f"grows by {self.new_text!r}" if self.new_text else "does not grow"
        most = some(self.max_tokens, "output token")
        return f"{self.rid} has {self.out_len} of at most {most}; its text {grows}."

    def brief(self) -> str:
        return f"{self.rid} #{self.out_len} {self.new_text!r}"


@dataclass(frozen=True, kw_only=True)
class TextHeld(Event):
    """The end of the text is not shown yet: a stop string may begin there, or a character is incomplete."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    text: str
    """What is held back."""
    stops: tuple[str, ...]
    """The stop strings that may begin; empty if it is half a character."""

    def explain(self) -> str:
        if not self.stops:
            return f"The last bytes of {self.rid} are half a character: they are held back until the rest of it comes."
        stops = " or ".join(repr(stop) for stop in self.stops)
        where = f"the stream of {self.rid}"
        return f"{self.text!r} is held back from {where}: it may be the beginning of the stop string {stops}."


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """A request ended."""

    style: ClassVar[str] = "bold green"
    rid: str
    """Request id."""
    reason: str
    """`stop`, `length`, `abort` or `error`."""
    matched: int | str | None
    """The stop token's id, the stop string, or the name of the limit that was reached."""
    why: str
    """The same in words."""
    out_len: int
    """Output tokens in all."""

    def explain(self) -> str:
        return f"{self.rid} ends after {some(self.out_len, 'output token')} ({self.reason}): {self.why}."

    def brief(self) -> str:
        return f"{self.rid} ends: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Abort(Event):
    """The caller gave a request up. It takes effect at the end of the step."""

    style: ClassVar[str] = "red"
    rid: str
    """Request id."""
    state: str
    """Where the request was: `waiting` or `running`."""

    def explain(self) -> str:
        return f"{self.rid} is aborted while {self.state}; what it holds is released at the end of the next step."


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """A step is over; where its time went. Execute includes preparing inputs; update includes outputs and release."""

    style: ClassVar[str] = "dim"
    ends_step: ClassVar[bool] = True
    num_tokens: int
    """Tokens that went through the model, padding not counted."""
    num_waiting: int
    """Requests that wait after the step."""
    num_running: int
    """Requests that run on."""
    kv_tokens: int
    """Tokens whose KV is held after the step."""
    schedule_ms: float = volatile()
    """Deciding what runs."""
    execute_ms: float = volatile()
    """Preparing inputs, and the model."""
    sample_ms: float = volatile()
    """Choosing the tokens."""
    update_ms: float = volatile()
    """Committing them, making outputs, releasing memory."""

    @property
    def total_ms(self) -> float:
        return sum(self.phases().values())

    def explain(self) -> str:
        return (
            f"Step of {self.total_ms:.2f} ms: schedule {self.schedule_ms:.2f}, model {self.execute_ms:.2f}, "
            f"sample {self.sample_ms:.2f}, update and text {self.update_ms:.2f}."
        )

    def brief(self) -> str:
        waiting = f"{self.num_waiting} waiting, " if self.num_waiting else ""
        return f"KV {some(self.kv_tokens, 'token')}, {waiting}{self.total_ms:.1f} ms"

    def counters(self) -> dict[str, float]:
        return {"batched tokens": self.num_tokens, "KV tokens": self.kv_tokens, "running": self.num_running}

    def phases(self) -> dict[str, float]:
        model, update = self.execute_ms, self.update_ms
        return {"schedule": self.schedule_ms, "execute": model, "sample": self.sample_ms, "update": update}
