"""Events of a batch: request joined or not and why, batch composition, padding, KV memory.

`Admit` and `Batch` extend m1's; m1's other events are used unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.events import Admit as SingleAdmit, Batch as SingleBatch
from m1_single_request.trace_event import Event, size, some
from m2_continuous_batching.outputs import BatchUsage


@dataclass(frozen=True, kw_only=True)
class Admit(SingleAdmit):
    """A waiting request joins the running batch."""

    block_ids: tuple[int, ...]
    """Its KV memory: one slot."""
    num_running: int
    """Number of running requests, this one included."""
    max_num_seqs: int
    """Maximum number of running requests."""
    budget_left: int
    """Tokens of this step's budget that remain after it."""
    max_num_batched_tokens: int
    """Token budget of a step."""

    def explain(self) -> str:
        slots = " and ".join(map(str, self.block_ids))
        return (
            f"{self.rid} joins: its {some(self.extend, 'prompt token')} leave {self.budget_left:,} of this step's "
            f"{self.max_num_batched_tokens:,}; it gets slot {slots}; {self.num_running} of at most {self.max_num_seqs} "
            f"run now, {self.num_waiting} still wait."
        )


@dataclass(frozen=True, kw_only=True)
class NotAdmitted(Event):
    """The first waiting request cannot join in this step, and no later one may overtake it."""

    style: ClassVar[str] = "dim cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    limit: str
    """The limit that was reached: `max_num_seqs`, `max_num_batched_tokens` or `kv_memory`."""
    needed: int
    """Amount that it needs: running requests with it, tokens in this step, or tokens of KV."""
    available: int
    """Amount that is available: the limit itself, or the rest of the budget."""
    num_waiting: int
    """Number of waiting requests, this one included."""

    def explain(self) -> str:
        why = {
            "max_num_seqs": f"max_num_seqs = {self.available} requests run already",
            "max_num_batched_tokens": (
                f"its {some(self.needed, 'prompt token')} do not fit into the {self.available:,} that are left of this "
                f"step's budget"
            ),
            "kv_memory": f"there is no KV memory for its {some(self.needed, 'token')}",
        }[self.limit]
        behind = f", and {some(self.num_waiting - 1, 'other')} behind it" if self.num_waiting > 1 else ""
        return f"{self.rid} must wait{behind}: {why}."


@dataclass(frozen=True, kw_only=True)
class LeftOut(Event):
    """Running requests get no token in this step: the prompts before them used the budget up."""

    style: ClassVar[str] = "yellow"
    rids: tuple[str, ...]
    """Request ids."""
    available: int
    """Token budget of a step."""

    def brief(self) -> str:
        return f"left out: {', '.join(self.rids)}"

    def explain(self) -> str:
        return (
            f"No token for {', '.join(self.rids)}: the budget of {self.available:,} is used up. In the "
            f"next step they run before any request is admitted."
        )


@dataclass(frozen=True, kw_only=True)
class Batch(SingleBatch):
    """The requests and tokens of one forward pass; prefills first. `mode` may be `mixed`."""

    joined: tuple[str, ...]
    """Requests whose prompt is in the batch."""
    left: tuple[str, ...]
    """Requests that ended since the previous batch, including those that never ran."""
    total_tokens: int
    """New tokens of all requests."""
    budget: int
    """Maximum number of new tokens."""

    @classmethod
    def of(cls, output: Any, joined: Sequence[Any], budget: int) -> Self:
        """Build the event for a `SchedulerOutput`. `joined`: the data of requests that are not in the running batch."""
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        rids = [*(request.req_id for request in joined), *cached.req_ids]
        prefix_lens = [*(request.num_computed_tokens for request in joined), *cached.num_computed_tokens]
        return cls(
            mode="mixed" if joined and cached.req_ids else "prefill" if joined else "decode",
            rids=tuple(rids),
            extend_lens=tuple(counts[rid] for rid in rids),
            prefix_lens=tuple(prefix_lens),
            seq_lens=tuple(prefix + counts[rid] for rid, prefix in zip(rids, prefix_lens, strict=True)),
            joined=tuple(rids[: len(joined)]),
            left=tuple(sorted(output.finished_req_ids)),
            total_tokens=output.total_num_scheduled_tokens,
            budget=budget,
        )

    def brief(self) -> str:
        return f"{self.mode:<7} {some(self.total_tokens, 'token')} of {some(len(self.rids), 'request')}"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.rids, ("decode" if n else "prefill" for n in self.prefix_lens), strict=True))

    def explain(self) -> str:
        prefills = sum(prefix == 0 for prefix in self.prefix_lens)
        decodes = len(self.rids) - prefills
        parts = []
        if prefills:
            parts.append(f"{some(prefills, 'prefill')} of {some(self.total_tokens - decodes, 'token')}")
        if decodes:
            parts.append(f"{some(decodes, 'decode')} of 1 token")
        changes = {"joined": self.joined, "left": self.left}
        change = "; ".join(f"{what}: {', '.join(rids)}" for what, rids in changes.items() if rids)
        return (
            f"Batch of {some(len(self.rids), 'request')}: {' and '.join(parts)}, {self.total_tokens:,} of at most "
            f"{self.budget:,} new tokens.{f' Since the last step {change}.' if change else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Forward(Event):
    """One pass of padded rows through the model."""

    style: ClassVar[str] = "blue"
    detail: ClassVar[bool] = True
    mode: str
    """`prefill` or `decode`."""
    num_requests: int
    """Number of requests."""
    num_rows: int
    """Rows of the tensors; more than requests where idle slots are included."""
    width: int
    """Columns of the tensors: the longest prompt, or 1."""
    useful_tokens: int
    """Places with a token."""
    padded_tokens: int
    """Places without a token."""
    kv_read: int
    """Positions of KV that attention reads, over all rows."""
    kv_needed: int
    """Positions of KV among them that belong to the requests."""

    def explain(self) -> str:
        places = self.useful_tokens + self.padded_tokens
        waste = f"{self.padded_tokens:,} of {places:,} places are padding" if self.padded_tokens else "no padding"
        return (
            f"Forward of all {self.mode}s: {self.num_rows} x {self.width}, {waste}; attention reads "
            f"{self.kv_read:,} positions of KV, {self.kv_needed:,} of them needed."
        )


@dataclass(frozen=True, kw_only=True)
class KVUsage(Event):
    """Padding of a step's forwards, and KV memory reserved and used."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    useful_tokens: int
    """New tokens in the forwards."""
    padded_tokens: int
    """Places without a token in the forwards."""
    kv_bytes_used: int
    """KV memory that holds keys and values of a request, in bytes."""
    kv_bytes_reserved: int
    """KV memory that is allocated, in bytes."""

    @classmethod
    def of(cls, read_usage: Callable[[], BatchUsage]) -> Self:
        """Build the event from the model runner's counts."""
        return cls(**vars(read_usage()))

    def counters(self) -> dict[str, float]:
        return {
            "padded tokens": self.padded_tokens,
            "KV bytes used": self.kv_bytes_used,
            "KV bytes reserved": self.kv_bytes_reserved,
        }

    def explain(self) -> str:
        return (
            f"{some(self.useful_tokens, 'useful token')}, {self.padded_tokens:,} padded; the KV memory holds "
            f"{size(self.kv_bytes_used)} of {size(self.kv_bytes_reserved)} reserved "
            f"({self.kv_bytes_used / max(1, self.kv_bytes_reserved):.1%})."
        )
