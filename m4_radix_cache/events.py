"""Events of requests that share KV: matched, ordered, admitted or not, batched, retracted; and an audit of the memory.

`Admit`, `NotAdmitted` and `Batch` extend those of m1 and m2: their numbers are tokens, not blocks. m3's
`ParallelSampling` is used unchanged. Events of the cache itself are in `mem_cache/events.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.events import Admit as SingleAdmit, Batch as SingleBatch
from m1_single_request.trace_event import Event, some
from m2_continuous_batching.events import NotAdmitted as BatchNotAdmitted
from m4_radix_cache.mem_cache.events import listed
from m4_radix_cache.request import Req


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Event):
    """A request arrived with a priority or a salt of its own."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    priority: int
    """Its priority; 0 is the default."""
    extra_key: str | None
    """Its namespace, named by `cache_salt`: it shares KV only with requests of the same namespace."""

    def explain(self) -> str:
        options = [f"has priority {self.priority:,}"] if self.priority else []
        if self.extra_key is not None:
            options.append(f"shares KV only with requests under the salt {self.extra_key!r}")
        return f"{self.rid} {' and '.join(options)}."


@dataclass(frozen=True, kw_only=True)
class PolicyOrder(Event):
    """The order in which several waiting requests are tried, and those that are held back in this round."""

    style: ClassVar[str] = "cyan"
    detail: ClassVar[bool] = True
    policy: str
    """The configured policy."""
    active: str
    """The policy of this round: `fcfs` if the configured one needs a sharing cache, or if too many requests wait."""
    rids: tuple[str, ...]
    """Request ids, in order; those that are held back come last."""
    num_held_back: int
    """Number of requests that are held back, because a request before them computes the same prefix."""
    num_retracted: int
    """Number of retracted requests, which come first."""
    hits: tuple[int, ...]
    """Cached tokens of each request; empty if the policy did not look them up."""

    @classmethod
    def of(cls, policy: str, active: str, order: Any, num_retracted: int, matches: Mapping[str, Any]) -> Self:
        """Build the event for an `Order`. `matches`: results of the lookups by request id, empty without lookups."""
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
        shown = [f"{rid} ({hit:,})" for rid, hit in zip(self.rids, self.hits, strict=True)] if self.hits else self.rids
        policy = f"{self.policy}, here as {self.active}" if self.policy != self.active else self.policy
        counts = ", with the tokens that are in the cache" if self.hits else ""
        first = f" {some(self.num_retracted, 'retracted request')} first." if self.num_retracted else ""
        number = len(self.rids) - self.num_held_back
        order = f"Order by {policy}{counts}: {', '.join(shown[:number])}.{first}"
        if not self.num_held_back:
            return order
        why = "because a request before them computes the same prefix"
        return f"{order} Held back for a round, {why}: {', '.join(shown[number:])}."


@dataclass(frozen=True, kw_only=True)
class Matched(Event):
    """The longest cached prefix of a request was looked up."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    query_len: int
    """Number of its tokens."""
    limit: int
    """Maximum number of tokens to take from the cache: all but the last, whose logits are needed, or 0 with prompt
    log-probabilities, which need the logits of all."""
    device_hit: int
    """Number of cached tokens; the request starts from their KV."""
    host_hit: int
    """Number of further tokens in host memory, whose KV must be copied."""

    @classmethod
    def of(cls, req: Req) -> Self:
        """Build the event for a request after its lookup."""
        return cls(
            rid=req.rid,
            query_len=len(req.fill_ids),
            limit=req.match_limit,
            device_hit=len(req.prefix_indices),
            host_hit=req.host_hit_length,
        )

    def explain(self) -> str:
        tokens, left = some(self.query_len, "token"), self.query_len - self.device_hit - self.host_hit
        if left == self.query_len:
            why = "the logits of its whole prompt are needed" if self.limit < left - 1 else "no prefix of it is cached"
            return f"{self.rid} can skip none of its {tokens}: {why}."
        host = f", and {self.host_hit:,} more in host memory" if self.host_hit else ""
        return (
            f"{self.rid} can skip {self.device_hit:,} of its {tokens}, whose KV is in the cache{host}; {self.limit:,} "
            f"would be the most, in whole pages. {left:,} {'is' if left == 1 else 'are'} left to compute."
        )


@dataclass(frozen=True, kw_only=True)
class Admit(SingleAdmit):
    """A waiting request joins the prefill batch. The budgets are those before it, with its prefix locked."""

    node: int
    """Node of the cache at which its prefix ends: one hit more for it and all above it. 0: the root."""
    num_output_tokens: int
    """Output tokens that it had before it was retracted or preempted."""
    need: int
    """Tokens that it takes now or may take later."""
    rem_total: int
    """Tokens that are neither taken nor reserved; more than `need`, except for a request that runs alone."""
    cur_rem: int
    """Tokens that are not taken, reserved ones included."""
    rem_input: int
    """Tokens of this step's budget that remain before it."""
    evictable: int
    """Tokens among `cur_rem` that must be evicted first."""
    result: str
    """Whether another request is tried: `continue`, `no_token` (memory is reserved) or `other` (the step is full)."""

    @classmethod
    def of(cls, adder: Any, req: Req, need: int, budgets: tuple[int, int, int], result: Any) -> Self:
        """Build the event for a request in a `PrefillAdder`. `budgets`: its `rem_total`, `cur_rem` and `rem_input`."""
        return cls(
            rid=req.rid,
            node=getattr(req.last_node, "id", 0),
            prefix=len(req.prefix_indices),
            extend=req.extend_input_len,
            num_waiting=adder.num_waiting,
            num_output_tokens=len(req.output_ids),
            need=need,
            rem_total=budgets[0],
            cur_rem=budgets[1],
            rem_input=budgets[2],
            evictable=adder.tree_cache.evictable_size(),
            result=result.value,
        )

    def explain(self) -> str:
        cached = f", {self.prefix:,} more are in the cache" if self.prefix else ""
        before = self.num_output_tokens
        again = f"; {before:,} of all are its own output from before it lost its place" if before else ""
        last = {
            "continue": "",
            "no_token": " No other request fits into the memory.",
            "other": " No other request fits into this step.",
        }[self.result]
        return (
            f"{self.rid} joins: {some(self.extend, 'token')} to compute{cached}{again}. It may need "
            f"{some(self.need, 'slot')} of {_budget(self.rem_total, self.cur_rem, self.evictable)}. This step could "
            f"compute {self.rem_input:,}.{last}"
        )


@dataclass(frozen=True, kw_only=True)
class NotAdmitted(BatchNotAdmitted):
    """A waiting request cannot join in this step, and no later one may overtake it.

    `limit` is `memory`, `max_num_seqs`, `max_num_batched_tokens` or another limit of a step. `needed`: tokens that it
    takes now or may take later, requests admitted in this step with it, or tokens in this step.
    """

    is_locked: bool
    """Whether `memory` sufficed until its own prefix was locked and no longer evictable."""
    prefix: int
    """Number of its cached tokens."""
    cur_rem: int
    """Tokens that are not taken, reserved ones included; `available` in memory are those that are not reserved."""
    evictable: int
    """Tokens among `cur_rem` that must be evicted first."""

    @classmethod
    def of(cls, adder: Any, req: Req, limit: str, needed: int, is_locked: bool) -> Self:
        """Build the event for a request that a `PrefillAdder` rejected."""
        places = len(adder.can_run_list) + 1, adder.max_new_reqs
        of_step = req.extend_input_len, adder.rem_input_tokens
        needs, rests = {"memory": (needed, adder.rem_total_tokens), "max_num_seqs": places}.get(limit, of_step)
        return cls(
            rid=req.rid,
            limit=limit,
            needed=needs,
            available=rests,
            num_waiting=adder.num_waiting,
            is_locked=is_locked,
            prefix=len(req.prefix_indices),
            cur_rem=adder.cur_rem_tokens,
            evictable=adder.tree_cache.evictable_size(),
        )

    def explain(self) -> str:
        budget = _budget(self.available, self.cur_rem, self.evictable)
        locked = f" once its {some(self.prefix, 'cached token')} are locked" * self.is_locked
        why = {
            "memory": f"it may need {some(self.needed, 'slot')}, which is not less than {budget}{locked}",
            "max_num_seqs": f"this step admits {some(self.available, 'request')}, then max_num_seqs run",
            "max_num_batched_tokens": (
                f"its {some(self.needed, 'token')}, in whole pages, are not less than the {self.available:,} that are "
                f"left of this step's budget"
            ),
        }.get(self.limit, f"{self.limit} allows none of its tokens in this step")
        return f"{self.rid} must wait: {why}."


@dataclass(frozen=True, kw_only=True)
class Retract(Event):
    """A running request was retracted: its KV is freed except what is cached, and it waits again."""

    style: ClassVar[str] = "bold yellow"
    rid: str
    """Request id."""
    num_tokens: int
    """Tokens with KV before it; it computes them again, except those that stay cached."""
    num_output_tokens: int
    """Output tokens, which are kept."""
    needed: int
    """Slots, in whole pages, that all running requests needed for their next tokens."""
    available: int
    """Slots that were free or evictable."""
    new_token_ratio: float
    """New estimate of the share of their remaining tokens that running requests will use."""

    @classmethod
    def of(cls, req: Req, num_tokens: int, needed: int, available: int, new_token_ratio: float) -> Self:
        """Build the event from the numbers before the retraction and the ratio after it."""
        return cls(
            rid=req.rid,
            num_tokens=num_tokens,
            num_output_tokens=len(req.output_ids),
            needed=needed,
            available=available,
            new_token_ratio=new_token_ratio,
        )

    def brief(self) -> str:
        return f"retracted: {self.rid}"

    def explain(self) -> str:
        return (
            f"{self.rid} is retracted: the next tokens need {some(self.needed, 'slot')}, {self.available:,} "
            f"{'is' if self.available == 1 else 'are'} free or evictable. It keeps its "
            f"{some(self.num_output_tokens, 'output token')}; the KV of its {some(self.num_tokens, 'token')} is freed, "
            f"except what is cached. It waits before all others. Running requests are expected to use "
            f"{self.new_token_ratio:.0%} of their remaining tokens."
        )


@dataclass(frozen=True, kw_only=True)
class Batch(SingleBatch):
    """The requests and tokens of one forward pass; `mode` is `extend` (prompts) or `decode`."""

    out_slots: tuple[int, ...]
    """Slots of the new tokens, request by request."""
    left: tuple[str, ...]
    """Requests that ended since the previous batch; those that were in no batch are not listed."""
    num_running: int
    """Number of running requests, including those whose next token must wait for an extend."""
    budget: int
    """Maximum number of new tokens."""

    @property
    def word(self) -> str:
        """The mode as a word of its own: `prefill` for `extend`."""
        return "prefill" if self.mode == "extend" else self.mode

    @property
    def total_tokens(self) -> int:
        return sum(self.extend_lens)

    @property
    def num_cached(self) -> int:
        """Tokens of an extend whose KV is cached."""
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
        return f"{self.word:<7} {some(self.total_tokens, 'token')} of {some(len(self.rids), 'request')}{cached}"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple((rid, self.word) for rid in self.rids)

    def explain(self) -> str:
        left = f" Since the last batch left: {', '.join(self.left)}." if self.left else ""
        requests = f"{some(len(self.rids), 'request')} ({listed(self.rids)})"
        if self.mode == "decode":
            return f"Decode of {requests}: 1 token each.{left}"
        cached = f", and {self.num_cached:,} more are read from the cache" if self.num_cached else ""
        waiting = self.num_running - len(self.rids)
        delayed = f" {some(waiting, 'running request')} must wait for that." if waiting else ""
        return (
            f"Prefill of {requests}: {some(self.total_tokens, 'token')} to compute, of at most {self.budget:,}{cached}."
            f"{delayed}{left}"
        )


@dataclass(frozen=True, kw_only=True)
class Audit(Event):
    """Owners of all slots, counted after a step: every slot has exactly one."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    available: int
    """Free slots."""
    evictable: int
    """Slots of cached tokens without a lock."""
    protected: int
    """Slots of cached tokens with a lock."""
    owned: int
    """Slots in pages that belong to requests."""
    total: int
    """All slots."""

    @classmethod
    def of(cls, scheduler: Any, pages_of: Callable[..., Any]) -> Self:
        """Build the event from the memory of a scheduler. `pages_of` returns the pages that requests own."""
        holding = [req for req in scheduler.requests.values() if req.req_pool_idx is not None]
        _, own = pages_of(holding, scheduler.pools)
        allocator, cache = scheduler.pools.token_to_kv_pool_allocator, scheduler.tree_cache
        return cls(
            available=allocator.available_size(),
            evictable=cache.evictable_size(),
            protected=cache.protected_size(),
            owned=len(own) * allocator.page_size,
            total=allocator.size,
        )

    @property
    def missing(self) -> int:
        """Slots without an owner; below 0 if slots have two."""
        return self.total - self.available - self.evictable - self.protected - self.owned

    @property
    def holds(self) -> bool:
        """Whether the four parts make up the whole."""
        return not self.missing

    def counters(self) -> dict[str, float]:
        return {
            "KV slots free": self.available,
            "KV slots evictable": self.evictable,
            "KV slots protected": self.protected,
            "KV slots owned": self.owned,
        }

    def explain(self) -> str:
        parts = f"{self.available:,} free + {self.evictable:,} evictable + {self.protected:,} protected + "
        parts += f"{self.owned:,} owned by requests"
        if self.holds:
            return f"{parts} = {some(self.total, 'slot')}: none is lost, none counted twice."
        error = f"{some(abs(self.missing), 'slot')} {'lost' if self.missing > 0 else 'counted twice'}"
        return f"{parts} is not {some(self.total, 'slot')}: {error}."


def _budget(rem_total: int, cur_rem: int, evictable: int) -> str:
    """Return the budget of memory as a text."""
    evicted = f", {evictable:,} of them only by eviction" if evictable else ""
    return f"{rem_total:,} ({cur_rem:,} not taken yet{evicted}, less {cur_rem - rem_total:,} kept for those that run)"
