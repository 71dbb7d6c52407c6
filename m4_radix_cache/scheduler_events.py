"""What the trace can say about requests that share KV: who goes first, who got in and at what price, who had to leave.

What happens in the cache stands in `events.py`. m3's `ParallelSampling` is used as it is. Its
`Admit` and `NotAdmitted` spoke of free blocks, its `Preempted` of swapping, and m2's `Batch` took every request with a
prefix for a decode; so these are said anew, in tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.events import Batch as SingleBatch
from m1_single_request.trace_event import Event, some


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Event):
    """A request arrived with a priority or a salt of its own."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    priority: int
    """How important it is; others have 0."""
    extra_key: str | None
    """Its namespace, named by `cache_salt`: it shares KV with requests of the same one only."""

    def explain(self) -> str:
        said = [f"has priority {self.priority:,}"] if self.priority else []
        if self.extra_key is not None:
            said.append(f"shares KV only with requests under the salt {self.extra_key!r}")
        return f"{self.rid} {' and '.join(said)}."


@dataclass(frozen=True, kw_only=True)
class PolicyOrder(Event):
    """Several requests wait: in which order they are asked to join, and who is not asked in this round."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    policy: str
    """The policy that was asked for."""
    active: str
    """The one that decided: `fcfs` where the other needs a cache that shares, or where too many wait for it."""
    rids: tuple[str, ...]
    """Request ids, in order; those that are held back come last."""
    num_held_back: int
    """So many of the last ones wait a round, because one before them computes what they would compute, too."""
    num_retracted: int
    """So many of the first ones lost their place once and stand before all others."""
    hits: tuple[int, ...]
    """How many tokens of each are in the cache; empty if the policy did not look."""

    @classmethod
    def of(cls, policy: str, active: str, order: Any, num_retracted: int, matches: Mapping[str, Any]) -> Self:
        """Build the event for an `Order`. `matches`: results of the lookups by request id, if there were any."""
        reqs = order.ready + order.held_back
        return cls(
            policy=policy,
            active=active,
            rids=tuple(req.rid for req in reqs),
            num_held_back=len(order.held_back),
            num_retracted=num_retracted,
            hits=tuple(len(matches[req.rid].device_indices) for req in reqs) if matches else (),
        )

    def explain(self) -> str:
        number = len(self.rids) - self.num_held_back
        shown = [f"{rid} ({hit:,})" for rid, hit in zip(self.rids, self.hits, strict=True)] if self.hits else self.rids
        decided = f"{self.policy}, here as {self.active}" if self.policy != self.active else self.policy
        counts = ", with the tokens that are in the cache" if self.hits else ""
        first = f" {some(self.num_retracted, 'retracted request')} first." if self.num_retracted else ""
        held = (
            f" Held back for a round, because one before them computes the same prefix: {', '.join(shown[number:])}."
            if self.num_held_back
            else ""
        )
        return f"Order by {decided}{counts}: {', '.join(shown[:number])}.{first}{held}"


@dataclass(frozen=True, kw_only=True)
class Admit(Event):
    """A waiting request joins. The budget is the one that it was judged by, its prefix locked already."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    prefix: int
    """Tokens whose KV is in the cache."""
    extend: int
    """Tokens that go through the model now."""
    num_output_tokens: int
    """What it had said before it was retracted."""
    need: int
    """Tokens that it takes now or may say later."""
    rem_total: int
    """Tokens that are neither taken nor expected to be; `need` is less, except if it is alone and came back."""
    cur_rem: int
    """Tokens that are not taken yet, expected ones included."""
    rem_input: int
    """What was left of the tokens that may be computed in one step."""
    evictable: int
    """Of the free tokens: those that the cache would have to give up first."""
    result: str
    """Whether another one may follow: `continue`, `no_token` (memory) or `other` (tokens of one step)."""

    def explain(self) -> str:
        cached = f", {self.prefix:,} more are in the cache" if self.prefix else ""
        again = (
            f"; {self.num_output_tokens:,} of all are its own output from before it was retracted"
            if self.num_output_tokens
            else ""
        )
        last = {
            "continue": "",
            "no_token": " Nobody else fits into the memory.",
            "other": " Nobody else fits into this step.",
        }[self.result]
        return (
            f"{self.rid} joins: {some(self.extend, 'token')} to compute{cached}{again}. It may need "
            f"{some(self.need, 'slot')} of {_budget(self.rem_total, self.cur_rem, self.evictable)}. This step could "
            f"compute {self.rem_input:,}.{last}"
        )


@dataclass(frozen=True, kw_only=True)
class NotAdmitted(Event):
    """A waiting request cannot join in this step; nobody behind it may overtake it."""

    style: ClassVar[str] = "dim cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    limit: str
    """What stands in its way: `memory`, `max_num_seqs`, `max_num_batched_tokens`, or another limit of a step."""
    is_locked: bool
    """Whether `memory` sufficed until its own prefix could not be evicted any more."""
    prefix: int
    """Tokens whose KV is in the cache."""
    extend: int
    """Tokens that it would compute."""
    need: int
    """Tokens that it would take now or may say later."""
    rem_total: int
    """Tokens that are neither taken nor expected to be; `need` must be less."""
    cur_rem: int
    """Tokens that are not taken yet, expected ones included."""
    rem_input: int
    """What is left of the tokens that may be computed in one step."""
    evictable: int
    """Of the free tokens: those that the cache would have to give up first."""

    def explain(self) -> str:
        budget = _budget(self.rem_total, self.cur_rem, self.evictable)
        locked = f" once the {some(self.prefix, 'token')} that it found there may not be evicted" * self.is_locked
        why = {
            "memory": f"it may need {some(self.need, 'slot')}, which is not less than {budget}{locked}",
            "max_num_seqs": "as many run as may",
            "max_num_batched_tokens": (
                f"its {some(self.extend, 'token')}, in whole pages, are not less than the {self.rem_input:,} that are "
                f"left of this step's budget"
            ),
        }.get(self.limit, f"{self.limit} lets nothing of it into this step")
        return f"{self.rid} must wait: {why}."


@dataclass(frozen=True, kw_only=True)
class Retract(Event):
    """A running request lost its place, so that others can go on."""

    style: ClassVar[str] = "bold yellow"
    rid: str
    """Request id."""
    num_tokens: int
    """Tokens whose KV it had; what others share of it stays."""
    num_output_tokens: int
    """What it has said; it is not lost."""
    needed: int
    """Tokens, in whole pages, that the running requests, this one included, needed for their next ones."""
    available: int
    """Tokens that were free or could be evicted."""
    new_token_ratio: float
    """The share of their remaining tokens that running requests are expected to say from now on."""

    def brief(self) -> str:
        return f"retracted: {self.rid}"

    def explain(self) -> str:
        return (
            f"{self.rid} is retracted: the next tokens need {some(self.needed, 'slot')}, {self.available:,} "
            f"{'is' if self.available == 1 else 'are'} free or can be evicted, and it was chosen, with "
            f"{some(self.num_output_tokens, 'output token')} so far. The KV of its {some(self.num_tokens, 'token')} "
            f"is given up, except what the cache has of it; it waits in front of all others. Those that run are "
            f"expected to say {self.new_token_ratio:.0%} of what they still may."
        )


@dataclass(frozen=True, kw_only=True)
class Batch(SingleBatch):
    """The requests and tokens of one forward pass: prompts or decodes, never both (m5 mixes them)."""

    out_slots: tuple[int, ...]
    """Where the KV of the new tokens goes: the slots of the first request, then those of the next one."""
    left: tuple[str, ...]
    """Requests that ended since the batch before; those that were in no batch are not listed."""
    num_running: int
    """Requests that run; in an extend, those that must wait for it with their next token are among them."""
    budget: int
    """How many new tokens there may be."""

    @property
    def total_tokens(self) -> int:
        return sum(self.extend_lens)

    @property
    def num_cached(self) -> int:
        """Tokens of an extend that need not be computed."""
        return sum(self.prefix_lens) if self.mode == "extend" else 0

    @classmethod
    def of(cls, batch: Any, scheduler: Any) -> Self:
        """Build the event for a `ScheduleBatch` and the state of the scheduler."""
        seq_lens = tuple(batch.seq_lens.tolist())
        extend_lens = tuple(batch.extend_lens or [1] * len(seq_lens))
        return cls(
            mode=batch.forward_mode.name.lower(),
            rids=tuple(req.rid for req in batch.reqs),
            extend_lens=extend_lens,
            prefix_lens=tuple(after - new for after, new in zip(seq_lens, extend_lens, strict=True)),
            seq_lens=seq_lens,
            out_slots=tuple(batch.out_cache_loc.tolist()),
            left=tuple(scheduler.unreported),
            num_running=len(scheduler.running),
            budget=scheduler.max_num_batched_tokens,
        )

    def brief(self) -> str:
        cached = f", {self.num_cached:,} more cached" if self.num_cached else ""
        return f"{self.mode:<7} {some(self.total_tokens, 'token')} of {some(len(self.rids), 'request')}{cached}"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple((rid, self.mode) for rid in self.rids)

    def explain(self) -> str:
        left = f" Since the last batch left: {', '.join(self.left)}." if self.left else ""
        if self.mode == "decode":
            return f"Decode batch of {some(len(self.rids), 'request')}: 1 token each.{left}"
        cached = f", and {self.num_cached:,} more are read from the cache" if self.num_cached else ""
        waiting = self.num_running - len(self.rids)
        delayed = f" {some(waiting, 'running request')} must wait for that." if waiting else ""
        return (
            f"Extend batch of {some(len(self.rids), 'request')}: {some(self.total_tokens, 'token')} to compute, of at "
            f"most {self.budget:,}{cached}.{delayed}{left}"
        )


def _budget(rem_total: int, cur_rem: int, evictable: int) -> str:
    """The memory in words."""
    given_up = f", {evictable:,} of them only by eviction" if evictable else ""
    return f"{rem_total:,} ({cur_rem:,} not taken yet{given_up}, less {cur_rem - rem_total:,} kept for those that run)"
