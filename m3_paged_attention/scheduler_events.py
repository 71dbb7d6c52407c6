"""Events about requests that are scheduled with KV blocks: admitted, not admitted, left out, preempted, split.

`Admit`, `NotAdmitted` and `LeftOut` extend those of m1 and m2; m2's `Batch` is used unchanged.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.events import Admit as SingleAdmit
from m1_single_request.trace_event import Event, some
from m2_continuous_batching.events import LeftOut as BatchLeftOut, NotAdmitted as BatchNotAdmitted
from m3_paged_attention.request import ParentRequest, Request


@dataclass(frozen=True, kw_only=True)
class ParallelSampling(Event):
    """A request for several continuations was split into one request for each."""

    style: ClassVar[str] = "cyan"
    rid: str
    """The caller's request."""
    children: tuple[str, ...]
    """The scheduled requests."""
    seeds: tuple[int, ...]
    """The seed of each."""

    @classmethod
    def of(cls, parent: ParentRequest) -> Self:
        """Build the event for a parent and its children."""
        children = tuple(child.request_id for child in parent.children)
        return cls(rid=parent.request_id, children=children, seeds=tuple(child.seed for child in parent.children))

    def explain(self) -> str:
        return (
            f"{self.rid} asks for {len(self.children)} continuations: {', '.join(self.children)}, with the seeds "
            f"{', '.join(map(str, self.seeds))}. They share the KV of the prompt as long as they can."
        )


@dataclass(frozen=True, kw_only=True)
class Admit(SingleAdmit):
    """A waiting request joins the running batch. `extend` is 0 if it starts after a sibling's prefill."""

    how: str
    """`prefill`: its tokens are computed. `fork`: it starts on the blocks of a sibling. `swap_in`: its blocks come back
    from host memory."""
    source: str | None
    """The sibling, in a fork."""
    num_output_tokens: int
    """Output tokens that it had before it was preempted."""
    num_blocks: int
    """Free blocks that it takes."""
    num_free: int
    """Number of free blocks after it."""
    num_running: int
    """Number of running requests, this one included."""
    max_num_seqs: int
    """Maximum number of running requests."""

    @classmethod
    def of(cls, scheduler: Any, request: Request, way: Any) -> Self:
        """Build the event for a request that has joined the batch by `way`, an `Admission.way_in`."""
        return cls(
            rid=request.request_id,
            how=way.how,
            source=way.source.request_id if way.source else None,
            prefix=request.sequence.num_computed_tokens,
            extend=way.num_tokens,
            num_output_tokens=request.sequence.get_output_len(),
            num_blocks=way.num_blocks,
            num_free=scheduler.kv_manager.num_free,
            num_running=len(scheduler.running),
            max_num_seqs=scheduler.admission.max_num_seqs,
            num_waiting=len(scheduler.waiting),
        )

    def explain(self) -> str:
        ways = {
            "prefill": f"{self.rid} joins: {some(self.extend, 'token')} to compute",
            "fork": f"{self.rid} joins on the blocks of {self.source}",
            "swap_in": f"{self.rid} comes back from host memory with the KV of {some(self.prefix, 'token')}",
        }
        again = ""
        if self.num_output_tokens and self.how == "prefill":
            again = f", {self.num_output_tokens} of them its own output from before it was preempted"
        start = "; it starts when that prompt is computed" if self.how == "fork" and not self.extend else ""
        return (
            f"{ways[self.how]}{again}{start}. It takes {some(self.num_blocks, 'free block')}, {self.num_free:,} are "
            f"left; {self.num_running} of at most {self.max_num_seqs} run now, {self.num_waiting} still wait."
        )


@dataclass(frozen=True, kw_only=True)
class NotAdmitted(BatchNotAdmitted):
    """The first waiting request cannot join in this step; `limit` may also be `blocks`."""

    kept_free: int
    """Blocks that stay free: one for each running request and for this one, so that they can grow."""

    def explain(self) -> str:
        why = {
            "max_num_seqs": f"max_num_seqs = {self.available} requests run already",
            "max_num_batched_tokens": (
                f"its {some(self.needed, 'token')} do not fit into the {self.available:,} that are left of this step's "
                f"budget"
            ),
            "blocks": (
                f"it needs {some(self.needed, 'block')} of {self.available:,} free ones, and {self.kept_free:,} must "
                f"stay free for the next tokens of those that run"
            ),
        }[self.limit]
        behind = f", and {some(self.num_waiting - 1, 'other')} behind it" if self.num_waiting > 1 else ""
        return f"{self.rid} must wait{behind}: {why}."


@dataclass(frozen=True, kw_only=True)
class LeftOut(BatchLeftOut):
    """Running requests get no token in this step. `available`: tokens of a step's budget, or free blocks."""

    limit: str
    """The limit that was reached: `max_num_batched_tokens`, or `blocks`, until the requests that end free theirs."""

    def explain(self) -> str:
        why = {
            "max_num_batched_tokens": f"the budget of {self.available:,} is used up",
            "blocks": f"too few blocks are free ({self.available:,}) until the requests that end free theirs",
        }[self.limit]
        return f"No token for {', '.join(self.rids)}: {why}. In the next step they run before any request is admitted."


@dataclass(frozen=True, kw_only=True)
class Preempted(Event):
    """A running request was preempted: its blocks are freed for others."""

    style: ClassVar[str] = "bold yellow"
    rid: str
    """Request id."""
    mode: str
    """`recompute`: its KV is discarded. `swap`: its KV moves to host memory."""
    num_blocks: int
    """Blocks in its table."""
    num_freed: int
    """Blocks freed: those that no other request holds."""
    needed: int
    """Blocks that all running requests need for their next tokens."""
    available: int
    """Number of free blocks before it."""
    num_tokens: int
    """Tokens with KV before it."""
    num_output_tokens: int
    """Output tokens, which are kept."""

    def brief(self) -> str:
        return f"preempted: {self.rid}"

    def explain(self) -> str:
        fate = (
            f"the KV of its {some(self.num_tokens, 'token')} is dropped and will be computed again"
            if self.mode == "recompute"
            else f"the KV of its {some(self.num_tokens, 'token')} moves to host memory"
        )
        return (
            f"{self.rid} is preempted: the next tokens need {some(self.needed, 'new block')}, {self.available:,} "
            f"{'is' if self.available == 1 else 'are'} free. It has {some(self.num_output_tokens, 'output token')} "
            f"and frees {self.num_freed} of its {some(self.num_blocks, 'block')}; {fate}. It waits before new requests."
        )
