"""What the trace can say about KV blocks: how many there are and why, who holds which, what is shared, copied, moved;
and about the kernels that read them.

m2 had slots, of which there was little to say. What happens to requests for want of blocks stands in
`scheduler_events.py`. vLLM exports a usage gauge; block by block, neither vLLM nor SGLang says anything.
"""

from dataclasses import dataclass
from typing import ClassVar

from m1_single_request.trace_event import Event, size, some
from m3_paged_attention.block_pool import blocks_for


@dataclass(frozen=True, kw_only=True)
class BackendChosen(Event):
    """Which kernels compute, and why no faster ones."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    asked: str
    """The setting `attention_backend`."""
    backend: str
    """What it came to: `native`, `torch` or `triton`."""
    obstacle: str | None
    """Why `auto` did not take what is fastest on this device; None if it did, or if it was not asked."""

    def explain(self) -> str:
        if self.obstacle is not None:
            return f"Kernels: {self.backend}; the faster ones cannot run here: {self.obstacle}."
        return f"Kernels: {self.backend}, {'the fastest here' if self.asked == 'auto' else 'as asked for'}."


@dataclass(frozen=True, kw_only=True)
class ThreadsChanged(Event):
    """The steps from this one on use another number of CPU threads (see `step_threads.py`)."""

    style: ClassVar[str] = "yellow"
    num_threads: int
    """Threads that a step uses."""
    limit: int
    """Threads that the caller has given: `torch.set_num_threads`, `OMP_NUM_THREADS`."""
    num_cores: int
    """Cores that this process may use."""
    other_cores: float
    """Cores that other programs have used lately."""

    def counters(self) -> dict[str, float]:
        return {"CPU threads": self.num_threads}

    def explain(self) -> str:
        return (
            f"Steps use {self.num_threads} of {some(self.limit, 'CPU thread')} now: other programs use "
            f"{self.other_cores:.1f} of {some(self.num_cores, 'core')}."
        )


@dataclass(frozen=True, kw_only=True)
class KVSized(Event):
    """How many blocks there are, and how that number came about."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    source: str
    """The setting that the number comes from: `num_blocks`, `kv_cache_memory_bytes` or `gpu_memory_utilization`."""
    budget_bytes: int | None
    """Bytes that the KV memory may take; None if the number of blocks was given."""
    total_bytes: int | None
    """The device's memory, where a share of it was the limit."""
    gpu_memory_utilization: float | None
    """That share."""
    peak_bytes: int | None
    """What all else takes at most, as the profiling run saw it."""
    block_size: int
    """Tokens per block."""
    block_bytes: int
    """K and V of one block over all layers."""
    bytes_per_token: int
    """The same for one token."""
    fitting_blocks: int
    """Blocks that the budget has room for, block 0 included; the given number and one, if it was given."""
    num_blocks: int
    """Blocks that can be handed out."""
    num_host_blocks: int
    """Blocks in host memory, for requests that are swapped out."""
    num_bytes: int
    """What is taken on the device, block 0 included."""
    num_host_bytes: int
    """What is taken on the host."""
    max_model_len: int
    """Tokens of the longest request."""
    max_num_seqs: int | None
    """Requests that may run at once, if no more blocks are made than these can fill."""

    @property
    def blocks_per_request(self) -> int:
        return blocks_for(self.max_model_len, self.block_size)

    def explain(self) -> str:
        each = some(self.block_size, "token")
        parts = []
        if self.budget_bytes is None:
            asked = f"num_blocks={self.num_blocks} of {each} was asked for"
            if self.source != "num_blocks":
                asked = f"{self.source} is room for {some(self.num_blocks, 'block')} of {each}"
            parts.append(f"{asked}, {size(self.block_bytes)} each")
        else:
            if self.total_bytes is not None and self.peak_bytes is not None:
                parts.append(
                    f"{self.gpu_memory_utilization:.0%} of {size(self.total_bytes)}, less {size(self.peak_bytes)} for "
                    f"all else, leave {size(self.budget_bytes or 0)}"
                )
            parts.append(
                f"{size(self.budget_bytes or 0)} / {size(self.block_bytes)} per block = "
                f"{some(self.fitting_blocks, 'block')} of {each}"
            )
            if self.max_num_seqs is not None and self.num_blocks < self.fitting_blocks - 1:
                parts.append(
                    f"{some(self.max_num_seqs, 'request')} of {some(self.blocks_per_request, 'block')} at most "
                    f"never fill more than {self.num_blocks:,}, so no more are made"
                )
        parts.append(f"with block 0, which is never handed out, they take {size(self.num_bytes)}")
        concurrency = self.num_blocks / self.blocks_per_request
        parts.append(
            f"room for {self.num_blocks * self.block_size:,} tokens, or {concurrency:,.1f} requests of "
            f"{self.max_model_len:,}"
        )
        if self.num_host_blocks:
            host = some(self.num_host_blocks, "more block")
            parts.append(f"{host} on the host for swapping take {size(self.num_host_bytes)}")
        return f"KV memory: {'; '.join(parts)}."


@dataclass(frozen=True, kw_only=True)
class BlocksAllocated(Event):
    """A request got blocks that nobody held."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    owner: str
    """Request id."""
    block_ids: tuple[int, ...]
    """The new blocks."""
    num_tokens: int
    """Tokens that it has room for now, as it asked."""
    num_owned: int
    """Blocks that it owns now, shared ones included."""
    num_free: int
    """Blocks that are still free."""

    def explain(self) -> str:
        return (
            f"{self.owner} needs room for {some(self.num_tokens, 'token')}: it gets {_blocks(self.block_ids)} and owns "
            f"{self.num_owned:,} now; {_are_free(self.num_free)}."
        )


@dataclass(frozen=True, kw_only=True)
class BlocksFreed(Event):
    """A request let go of its blocks."""

    style: ClassVar[str] = "magenta"
    owner: str
    """Request id."""
    block_ids: tuple[int, ...]
    """The blocks that are free now."""
    num_kept: int
    """Its other blocks: somebody else holds them, too, so they stay in use."""
    on_host: bool
    """Whether they are host blocks: the request was swapped out."""
    num_free: int
    """Blocks that are free there now."""

    def explain(self) -> str:
        block = "host block" if self.on_host else "block"
        freed = f"gives {_blocks(self.block_ids)} back" if self.block_ids else "gives no block back"
        stay = "stays in use, because others hold it" if self.num_kept == 1 else "stay in use, because others hold them"
        kept = f"; {self.num_kept:,} {stay}" if self.num_kept else ""
        return f"{self.owner} {freed}{kept}; {_are_free(self.num_free, block)}."


@dataclass(frozen=True, kw_only=True)
class BlocksForked(Event):
    """A request starts on blocks of another one."""

    style: ClassVar[str] = "cyan"
    owner: str
    """The new request."""
    parent: str
    """The one whose blocks it shares."""
    block_ids: tuple[int, ...]
    """The shared blocks."""
    num_tokens: int
    """Tokens in them that it need not compute."""

    def request_ids(self) -> tuple[str, ...]:
        return self.parent, self.owner

    def explain(self) -> str:
        return (
            f"{self.owner} shares {_blocks(self.block_ids)} with {self.parent}: the KV of its first "
            f"{some(self.num_tokens, 'token')} need not be computed, nor stored twice."
        )


@dataclass(frozen=True, kw_only=True)
class BlockCopied(Event):
    """A request is about to write into a shared block: it gets a copy of its own (copy on write)."""

    style: ClassVar[str] = "cyan"
    owner: str
    """Who writes."""
    source: int
    """The shared block."""
    target: int
    """The copy, which takes its place in the owner's block table."""
    num_holders: int
    """How many still hold the shared one."""
    num_free: int
    """Blocks that are still free."""

    def explain(self) -> str:
        return (
            f"{self.owner} is about to write into block {self.source}, which {some(self.num_holders, 'other')} "
            f"{'holds' if self.num_holders == 1 else 'hold'}, too: it is copied to block {self.target}, and "
            f"{self.owner} goes on there; {_are_free(self.num_free)}."
        )


@dataclass(frozen=True, kw_only=True)
class BlocksSwapped(Event):
    """A request's blocks move to host memory, or back."""

    style: ClassVar[str] = "yellow"
    owner: str
    """Request id."""
    direction: str
    """`out`: from the device to the host; `in`: back."""
    block_ids: tuple[int, ...]
    """Its blocks on the device."""
    host_block_ids: tuple[int, ...]
    """Its blocks on the host, in the same order."""
    num_free: int
    """Blocks that are free on the device now."""
    num_host_free: int
    """Blocks that are free on the host now."""

    def explain(self) -> str:
        here, there = _blocks(self.block_ids), f"host {_blocks(self.host_block_ids)}"
        source, target = (here, there) if self.direction == "out" else (there, here)
        return (
            f"{self.owner} is swapped {self.direction}: {source} to {target}; {_are_free(self.num_free, 'block')} on "
            f"the device, {self.num_host_free:,} on the host."
        )


@dataclass(frozen=True, kw_only=True)
class KVUsage(Event):
    """How full the blocks are. What a request has reserved beyond its tokens is lost to all others."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    num_used: int
    """Blocks in use."""
    num_free: int
    """Blocks that are free."""
    num_shared: int
    """Blocks among the used ones that several requests hold."""
    num_host_used: int
    """Host blocks in use, by requests that are swapped out."""
    block_size: int
    """Slots per block."""
    tokens_held: int
    """Slots of used blocks that hold a token; shared ones count once."""

    @property
    def utilisation(self) -> float:
        """The share of the slots in used blocks that hold a token."""
        return self.tokens_held / (self.num_used * self.block_size) if self.num_used else 1.0

    @property
    def fragmentation(self) -> float:
        """The share that is reserved but unused: the ends of the last blocks."""
        return 1 - self.utilisation

    def counters(self) -> dict[str, float]:
        return {
            "KV blocks used": self.num_used,
            "KV blocks free": self.num_free,
            "KV blocks shared": self.num_shared,
            "KV fragmentation %": round(100 * self.fragmentation, 1),
        }

    def explain(self) -> str:
        slots = self.num_used * self.block_size
        host = f"; {some(self.num_host_used, 'block')} on the host in use" if self.num_host_used else ""
        if not self.num_used:
            return f"0 of {some(self.num_free, 'block')} in use{host}."
        return (
            f"{self.num_used:,} of {some(self.num_used + self.num_free, 'block')} in use, {self.num_shared:,} of them "
            f"shared{host}. They hold {some(self.tokens_held, 'token')} in {some(slots, 'slot')}: "
            f"{self.utilisation:.1%} used, {self.fragmentation:.1%} reserved for nothing."
        )


def _are_free(count: int, noun: str = "") -> str:
    """`1 is free`, `3 blocks are free`."""
    return f"{some(count, noun) if noun else f'{count:,}'} {'is' if count == 1 else 'are'} free"


def _blocks(block_ids: tuple[int, ...]) -> str:
    """`block 3`, `blocks 3-7, 9`: neighbours are told as one range."""
    if not block_ids:
        return "no block"
    runs: list[list[int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][-1] + 1:
            runs[-1][1:] = [block_id]
        else:
            runs.append([block_id])
    named = ", ".join("-".join(map(str, run)) for run in runs)
    return f"block{'' if len(block_ids) == 1 else 's'} {named}"
