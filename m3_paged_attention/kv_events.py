"""Events about KV blocks: allocated, freed, shared, copied, swapped, used.

vLLM exports a usage gauge; neither vLLM nor SGLang reports single blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some


@dataclass(frozen=True, kw_only=True)
class BlocksAllocated(Event):
    """A request got free blocks."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    owner: str
    """Request id."""
    block_ids: tuple[int, ...]
    """The new blocks."""
    num_tokens: int
    """Tokens that it has room for now."""
    num_owned: int
    """Blocks that it owns now, including shared ones."""
    num_free: int
    """Number of free blocks after it."""

    def explain(self) -> str:
        return (
            f"{self.owner} needs room for {some(self.num_tokens, 'token')}: it gets {_blocks(self.block_ids)} and owns "
            f"{self.num_owned:,} now; {_are_free(self.num_free)}."
        )


@dataclass(frozen=True, kw_only=True)
class BlocksFreed(Event):
    """The blocks of a request were released."""

    style: ClassVar[str] = "magenta"
    owner: str
    """Request id."""
    block_ids: tuple[int, ...]
    """The blocks that are free now."""
    num_kept: int
    """Number of its other blocks, which other requests hold, too, so that they stay in use."""
    on_host: bool
    """True for host blocks: the request was swapped out."""
    num_free: int
    """Number of free blocks in that memory after it."""

    def explain(self) -> str:
        block = "host block" if self.on_host else "block"
        freed = f"frees {_blocks(self.block_ids)}"
        stay = "stays in use, because others hold it" if self.num_kept == 1 else "stay in use, because others hold them"
        kept = f"; {self.num_kept:,} {stay}" if self.num_kept else ""
        return f"{self.owner} {freed}{kept}; {_are_free(self.num_free, block)}."


@dataclass(frozen=True, kw_only=True)
class BlocksForked(Event):
    """A request starts with blocks of another request."""

    style: ClassVar[str] = "cyan"
    owner: str
    """The new request."""
    parent: str
    """The request whose blocks it shares."""
    block_ids: tuple[int, ...]
    """The shared blocks."""
    num_tokens: int
    """Tokens in these blocks, which are not computed again."""

    def request_ids(self) -> tuple[str, ...]:
        return self.parent, self.owner

    def explain(self) -> str:
        return (
            f"{self.owner} shares {_blocks(self.block_ids)} with {self.parent}: the KV of its first "
            f"{some(self.num_tokens, 'token')} need not be computed, nor stored twice."
        )


@dataclass(frozen=True, kw_only=True)
class BlockCopied(Event):
    """Copy on write: a request that writes into a shared block gets a copy of the block."""

    style: ClassVar[str] = "cyan"
    owner: str
    """Request id of the writer."""
    source: int
    """The shared block."""
    target: int
    """The copy, which takes its place in the owner's block table."""
    num_holders: int
    """Number of requests that hold the shared block after it."""
    num_free: int
    """Number of free blocks after it."""

    def explain(self) -> str:
        return (
            f"{self.owner} is about to write into block {self.source}, which {some(self.num_holders, 'other')} "
            f"{'holds' if self.num_holders == 1 else 'hold'}, too: it gets a copy, block {self.target}; "
            f"{_are_free(self.num_free)}."
        )


@dataclass(frozen=True, kw_only=True)
class BlocksSwapped(Event):
    """The blocks of a request moved to host memory, or back."""

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
    """Number of free blocks on the device after it."""
    num_host_free: int
    """Number of free blocks on the host after it."""

    def explain(self) -> str:
        here, there = _blocks(self.block_ids), f"host {_blocks(self.host_block_ids)}"
        source, target = (here, there) if self.direction == "out" else (there, here)
        return (
            f"{self.owner} is swapped {self.direction}: {source} to {target}; {_are_free(self.num_free, 'block')} on "
            f"the device, {self.num_host_free:,} on the host."
        )


@dataclass(frozen=True, kw_only=True)
class BlocksUsed(Event):
    """Use of the blocks after a step. Slots that a request reserves beyond its tokens are lost to all others."""

    style: ClassVar[str] = "magenta"
    detail: ClassVar[bool] = True
    num_used: int
    """Number of used blocks."""
    num_free: int
    """Number of free blocks."""
    num_shared: int
    """Number of used blocks that several requests hold."""
    num_host_used: int
    """Number of used host blocks."""
    block_size: int
    """Slots per block."""
    tokens_held: int
    """Slots of used blocks that hold a token; shared ones count once."""

    @classmethod
    def of(cls, kv_manager: Any, tokens_held: Callable[[], int]) -> Self:
        """Build the event from the state of the `KVCacheManager`."""
        usage = kv_manager.usage()
        return cls(
            num_used=usage.num_used,
            num_free=usage.num_free,
            num_shared=usage.num_shared,
            num_host_used=sum(map(len, kv_manager.swapped().values())),
            block_size=kv_manager.block_size,
            tokens_held=tokens_held(),
        )

    @property
    def utilisation(self) -> float:
        """Share of the slots in used blocks that hold a token."""
        return self.tokens_held / (self.num_used * self.block_size) if self.num_used else 1.0

    @property
    def fragmentation(self) -> float:
        """Share of the slots that are reserved but empty: the ends of the last blocks."""
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
    """Format a number of free blocks: `1 is free`, `3 blocks are free`."""
    return f"{some(count, noun) if noun else f'{count:,}'} {'is' if count == 1 else 'are'} free"


def _blocks(block_ids: tuple[int, ...]) -> str:
    """Format block ids: `block 3`, or `blocks 3-7, 9` with adjacent ids as a range."""
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
