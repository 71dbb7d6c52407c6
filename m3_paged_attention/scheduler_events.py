"""What the trace can say about requests in a memory of blocks: who got in and how, who was thrown out and why.

What happens to the blocks themselves stands in `events.py`. m2's `Batch` is used as it is; its `Admit` and
`NotAdmitted` spoke of slots, its `LeftOut` of tokens only, so these are said anew.
"""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event, some


@dataclass(frozen=True, kw_only=True)
class ParallelSampling(Event):
    """A request for several continuations becomes as many requests."""

    style: ClassVar[str] = "cyan"
    rid: str
    """The request that the caller knows."""
    children: tuple[str, ...]
    """The requests that are scheduled for it."""
    seeds: tuple[int, ...]
    """The seed of each."""

    def explain(self) -> str:
        return (
            f"{self.rid} asks for {len(self.children)} continuations: {', '.join(self.children)}, with the seeds "
            f"{', '.join(map(str, self.seeds))}. They share the KV of the prompt as long as they can."
        )


@dataclass(frozen=True, kw_only=True)
class Admit(Event):
    """A waiting request joins the running batch."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    how: str
    """`prefill`: its tokens are computed. `fork`: it starts on the blocks of a sibling. `swap_in`: its blocks come back
    from host memory."""
    source: str | None
    """The sibling, in a fork."""
    prefix: int
    """Tokens whose KV exists already."""
    extend: int
    """Tokens that go through the model now; 0 if it starts after the sibling's prefill."""
    num_output_tokens: int
    """What it had said before it was preempted."""
    num_blocks: int
    """Free blocks that it takes."""
    num_free: int
    """Free blocks that are left."""
    num_running: int
    """Requests that run, this one included."""
    max_num_seqs: int
    """How many may."""
    budget_left: int
    """What it leaves of this step's token budget."""
    num_waiting: int
    """Requests that still wait."""

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
class NotAdmitted(Event):
    """The first waiting request cannot join in this step; nobody behind it may overtake it."""

    style: ClassVar[str] = "dim cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    limit: str
    """What stands in its way: `max_num_seqs`, `max_num_batched_tokens` or `blocks`."""
    needed: int
    """What it needs of that."""
    available: int
    """What there is."""
    kept_free: int
    """Of the free blocks: one for each running request and for itself, so that they can grow."""
    num_waiting: int
    """Requests that wait, this one included."""

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
class LeftOut(Event):
    """Running requests get no token in this step."""

    style: ClassVar[str] = "yellow"
    rids: tuple[str, ...]
    """Request ids."""
    limit: str
    """What is used up: `max_num_batched_tokens`, by the prompts before them, or `blocks`, by others that end now."""
    available: int
    """How many tokens there may be in a step; or how many blocks are free."""

    def brief(self) -> str:
        return f"left out: {', '.join(self.rids)}"

    def explain(self) -> str:
        why = {
            "max_num_batched_tokens": f"the budget of {self.available:,} is used up",
            "blocks": f"too few blocks are free ({self.available:,}) before those that end have left theirs",
        }[self.limit]
        return f"No token for {', '.join(self.rids)}: {why}. In the next step they run before anybody is admitted."


@dataclass(frozen=True, kw_only=True)
class Preempted(Event):
    """A running request lost its blocks, so that others can go on."""

    style: ClassVar[str] = "bold yellow"
    rid: str
    """Request id."""
    mode: str
    """`recompute`: its KV is dropped. `swap`: it is moved to host memory."""
    num_blocks: int
    """Blocks in its table."""
    num_freed: int
    """Those that nobody else owns, so that they come free."""
    needed: int
    """Blocks that the running requests, this one included, needed for their next tokens."""
    available: int
    """Free blocks before."""
    num_tokens: int
    """Tokens whose KV it had."""
    num_output_tokens: int
    """What it has said; it is not lost."""

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
            f"{'is' if self.available == 1 else 'are'} free, and it has the fewest outputs ({self.num_output_tokens}). "
            f"{self.num_freed} of its {some(self.num_blocks, 'block')} come free; {fate}. It waits in front of all "
            f"others."
        )
