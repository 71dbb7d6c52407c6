"""Events of m1's trace: model loaded, request queued, admitted, batched, KV allocated and freed, step done.

An event is a decision of the engine with its numbers; `explain()` is the same in a sentence. Where the numbers have to
be computed first, the classmethod `of` does so, and only for a reader (`Tracer.emit`). Fields marked volatile (times,
floats computed by the model) differ between machines; `JsonlReader(stable=True)` omits them. Events about tokens and
text are in `output_events.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.model_loader import LoadedModel, head_dim
from m1_single_request.request import Request
from m1_single_request.trace_event import Event as Event, Phase, size as size, some as some, volatile as volatile


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
    """Device of the weights."""
    dtype: str
    """Precision of weights and KV."""
    named_dtype: str
    """Precision that config.json names."""
    num_parameters: int
    """Tied embeddings count once."""
    weight_bytes: int
    """Size of the weights: a decode step reads all of them, and the KV."""
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
    """Positions of the model, in tokens."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """Build the event for a loaded model."""
        config = loaded.config.get_text_config()
        return cls(
            model=loaded.name.rsplit("/", 1)[-1],
            architecture=loaded.architecture,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            named_dtype=str(loaded.named_dtype).removeprefix("torch."),
            num_parameters=loaded.num_parameters,
            weight_bytes=loaded.weight_bytes,
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            kv_bytes_per_token=loaded.kv_bytes_per_token,
            max_model_len=loaded.max_model_len,
            num_positions=config.max_position_embeddings,
        )

    def explain(self) -> str:
        value_bytes = self.kv_bytes_per_token // (2 * self.num_layers * self.num_kv_heads * self.head_dim)
        is_changed = self.named_dtype == "float16" != self.dtype
        named = " (config.json names float16)" if is_changed else ""
        limit = f" A request has at most {self.max_model_len:,} tokens, of {self.num_positions:,} that the model takes."
        return (
            f"{self.architecture} ({self.model}) is ready on {self.device}: {self.num_parameters / 1e6:,.1f} M "
            f"parameters, {size(self.weight_bytes)} as {self.dtype}{named}. The KV of one token takes 2 (K and V) x "
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} x {value_bytes} "
            f"bytes = {self.kv_bytes_per_token:,} bytes.{limit if self.max_model_len < self.num_positions else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class RequestAdded(Event):
    """A request passed all checks and joined the waiting queue."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    len: int
    """Prompt tokens."""
    max_tokens: int
    """Maximum number of output tokens."""
    greedy: bool
    """True if it takes the best token instead of drawing one."""
    seed: int
    """Seed of the draws: the request's own, or derived from the engine's seed and the request's number."""
    num_waiting: int
    """Requests before it in the queue."""

    @classmethod
    def of(cls, request: Request, num_waiting: int) -> Self:
        """Build the event for a request that joins the queue behind `num_waiting` others."""
        return cls(
            rid=request.request_id,
            len=request.sequence.get_prompt_len(),
            max_tokens=request.sampling_params.max_tokens,
            greedy=request.sampling_params.is_greedy,
            seed=request.seed,
            num_waiting=num_waiting,
        )

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
    """Tokens whose KV exists already; 0 in m1 and m2."""
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
    """The requests and tokens of one forward pass."""

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
    """Request id."""
    tokens: int
    """Tokens added."""
    total_tokens: int
    """Tokens in the request's KV cache now."""
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
    """KV memory was freed."""

    style: ClassVar[str] = "magenta"
    owner: str
    """Request id."""
    tokens: int
    """Tokens freed."""
    bytes: int
    """The same in bytes."""

    def explain(self) -> str:
        return f"KV cache of {self.owner} is released: {some(self.tokens, 'token')}, {size(self.bytes)}."


@dataclass(frozen=True, kw_only=True)
class Abort(Event):
    """A request was aborted. It ends with the next update."""

    style: ClassVar[str] = "red"
    rid: str
    """Request id."""
    state: str
    """Status of the request: `waiting`, `running` or `preempted`."""

    def explain(self) -> str:
        return f"{self.rid} is aborted while {self.state}; what it holds is released at the end of the next step."


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """End of a step, and its time in milliseconds. Execute includes preparing inputs; update, outputs and release."""

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
    laps: tuple[Phase, ...] = volatile()
    """The parts of the step in order: each with its phase, and its begin and end in monotonic seconds. `schedule`: the
    decision; `execute`: preparing inputs and the model; `sample`; `update`: commit, outputs, release of memory."""

    @classmethod
    def of(cls, record: Any, queues: Any, num_kv_tokens: Callable[[], int]) -> Self:
        """Build the event from the engine core's `StepRecord` and the scheduler's queues."""
        return cls(
            num_tokens=record.num_tokens,
            num_waiting=len(queues.waiting),
            num_running=len(queues.running),
            kv_tokens=num_kv_tokens(),
            laps=tuple(Phase(*lap) for lap in record.laps),
        )

    def milliseconds(self, phase: str) -> float:
        """Return the time of all laps of a phase."""
        return sum(lap.ended - lap.began for lap in self.laps if lap.name == phase) * 1e3

    @property
    def total_ms(self) -> float:
        return sum(lap.ended - lap.began for lap in self.laps) * 1e3

    def explain(self) -> str:
        schedule, execute, sample, update = map(self.milliseconds, ("schedule", "execute", "sample", "update"))
        return (
            f"Step of {self.total_ms:.2f} ms: schedule {schedule:.2f}, model {execute:.2f}, sample {sample:.2f}, "
            f"update and text {update:.2f}."
        )

    def brief(self) -> str:
        waiting = f"{self.num_waiting} waiting, " if self.num_waiting else ""
        return f"KV {some(self.kv_tokens, 'token')}, {waiting}{self.total_ms:.1f} ms"

    def counters(self) -> dict[str, float]:
        return {"batched tokens": self.num_tokens, "KV tokens": self.kv_tokens, "running": self.num_running}

    def phases(self) -> tuple[Phase, ...]:
        return self.laps
