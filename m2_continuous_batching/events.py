"""What the trace can say about a batch: who joined, who could not and why, what ran together, and what was padding.

m1's `Admit` and `Batch` speak of one request, so they are said anew here; the others of m1 are used as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event, size, some


@dataclass(frozen=True, kw_only=True)
class Admit(Event):
    """A waiting request joins the running batch."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    prefix: int
    """Tokens whose KV exists already; always 0 before m4."""
    extend: int
    """Tokens to prefill."""
    block_ids: tuple[int, ...]
    """Its KV memory: its slot."""
    num_running: int
    """Requests that run, this one included."""
    max_num_seqs: int
    """How many may."""
    budget_left: int
    """What it leaves of this step's token budget."""
    max_num_batched_tokens: int
    """The whole budget."""
    num_waiting: int
    """Requests that still wait."""

    def explain(self) -> str:
        slots = " and ".join(map(str, self.block_ids))
        return (
            f"{self.rid} joins: its {some(self.extend, 'prompt token')} leave {self.budget_left:,} of this step's "
            f"{self.max_num_batched_tokens:,}; it gets slot {slots}; {self.num_running} of at most {self.max_num_seqs} "
            f"run now, {self.num_waiting} still wait."
        )


@dataclass(frozen=True, kw_only=True)
class NotAdmitted(Event):
    """The first waiting request cannot join in this step; nobody behind it may overtake it."""

    style: ClassVar[str] = "dim cyan"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    limit: str
    """What stands in its way: `max_num_seqs`, `max_num_batched_tokens` or `kv_memory`."""
    needed: int
    """What it needs of that: running requests with it, tokens in this step, tokens of KV."""
    available: int
    """What there is: the limit itself, or what is left of the budget."""
    num_waiting: int
    """Requests that wait, this one included."""

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
    max_num_batched_tokens: int
    """The budget."""

    def brief(self) -> str:
        return f"left out: {', '.join(self.rids)}"

    def explain(self) -> str:
        return (
            f"No token for {', '.join(self.rids)}: the budget of {self.max_num_batched_tokens:,} is used up. In the "
            f"next step they run before anybody is admitted."
        )


@dataclass(frozen=True, kw_only=True)
class Batch(Event):
    """What goes through the model in this step."""

    style: ClassVar[str] = "bold blue"
    mode: str
    """`prefill`, `decode` or `mixed`."""
    rids: tuple[str, ...]
    """Request ids, one per row of the fields below: prefills first."""
    extend_lens: tuple[int, ...]
    """New tokens per request."""
    prefix_lens: tuple[int, ...]
    """Tokens per request whose KV is read instead of computed: 0 in a prefill."""
    seq_lens: tuple[int, ...]
    """Tokens per request after this step's forward: prefix plus extend."""
    joined: tuple[str, ...]
    """Requests whose prompt is in the batch."""
    left: tuple[str, ...]
    """Requests that ended since the batch before, those included that never ran."""
    total_tokens: int
    """New tokens of all."""
    budget: int
    """How many there may be."""

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
    """Requests in it."""
    num_rows: int
    """Rows of its tensors; more than requests where idle slots go along."""
    width: int
    """Columns of its tensors: the longest prompt, or 1."""
    useful_tokens: int
    """Places that hold a token."""
    padded_tokens: int
    """Places that hold none."""
    kv_read: int
    """Positions of KV that attention goes through, over all rows."""
    kv_needed: int
    """Those among them that belong to the requests."""

    def explain(self) -> str:
        places = self.useful_tokens + self.padded_tokens
        waste = f"{self.padded_tokens:,} of {places:,} places are padding" if self.padded_tokens else "no padding"
        return (
            f"Forward of all {self.mode}s: {self.num_rows} x {self.width}, {waste}; attention reads "
            f"{self.kv_read:,} positions of KV, {self.kv_needed:,} of them needed."
        )


@dataclass(frozen=True, kw_only=True)
class KVUsage(Event):
    """What a step's forwards wasted, and how much of the reserved KV memory holds anything."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    useful_tokens: int
    """New tokens that went through the model."""
    padded_tokens: int
    """Padding that went with them."""
    kv_bytes_used: int
    """KV memory that holds keys and values of a request."""
    kv_bytes_reserved: int
    """KV memory that is taken."""

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
