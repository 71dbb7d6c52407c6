"""What the scheduler asks of KV memory in blocks, and the messages in which it is told: numbers without tensors.

m2 asked whether a request can be held, reserved and released. Blocks can also be shared, moved to the host and copied,
and they can run out under running requests: there m2's promise ends, that whoever was let in can stay. One class
answers all this, in `kv_cache_manager.py`; another can take its place (`parts={"kv_manager": ...}`). vLLM:
`v1/core/kv_cache_manager.py`; SGLang: `mem_cache/allocator.py`.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from m1_single_request.tracer import Tracer
from m2_continuous_batching.kv_manager import KVManager
from m3_paged_attention.block_pool import Pairs
from m3_paged_attention.kv_cache_config import KVCacheConfig


class BlockMoves(NamedTuple):
    """Data to be moved before the coming forward: swap in, then swap out, then copy.

    Within one list all sources are read before any target is written; no block is a target twice.
    """

    swap_in: Pairs  # (host block, device block)
    swap_out: Pairs  # (device block, host block)
    copies: Pairs  # (source, target), both on the device
    owners: frozenset[str]
    """Whose data it is. If the moves are not made, it is lost: these requests must be computed again."""


class BlockUsage(NamedTuple):
    """The device's blocks, block 0 not counted."""

    num_blocks: int
    num_free: int
    num_used: int
    num_shared: int
    """Those among the used ones that stand in more than one table."""


class PagedKVManager(KVManager, Protocol):
    """m2's verbs, and those that blocks make possible.

    A yes of `can_hold` is good for the next `reserve` only: who runs may be refused in the next step.
    """

    block_size: int
    num_blocks: int
    """Blocks on the device, free or not."""

    def __init__(self, *, kv_cache_config: KVCacheConfig, tracer: Tracer) -> None: ...

    @property
    def num_free(self) -> int:
        """Free blocks on the device."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill; the last one perhaps in part."""

    def num_needed(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that it takes to give this request room for `num_tokens` tokens in all.

        For a swapped one: to swap it in and then to give it that room.
        """

    def num_needed_together(self, lengths: Iterable[tuple[str, int]]) -> int:
        """The same for several that run, by (request id, number of tokens).

        It may be less than the sum: of those who share the block they write to, the last one keeps it.
        """

    def in_need(self, lengths: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of these (request id, number of tokens) for which `reserve` may have anything to do, in their order."""

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Let a new request share the blocks that hold the first `num_tokens` tokens of another."""

    def swap_out(self, request_id: str) -> bool:
        """Move a request to host memory. False, and nothing changed, if there is too little of it."""

    def swap_in(self, request_id: str) -> None:
        """Move it back. Only before anybody is thrown out in the same step: swaps in are made first."""

    def is_swapped(self, request_id: str) -> bool:
        """Whether its blocks are on the host."""

    def swapped(self) -> Mapping[str, list[int]]:
        """Every owner on the host with its host block ids; `owned` has those on the device."""

    def take_moves(self) -> BlockMoves:
        """The moves noted since the last call, to be made now. To call it again is to say that they were made."""

    def touched(self) -> frozenset[str]:
        """Whose data is concerned by moves that were noted, or taken last: if a step is lost, these may be lost."""

    def usage(self) -> BlockUsage:
        """How the device's blocks are used."""

    def num_tokens_held(self, lengths: Mapping[str, int]) -> int:
        """Slots that hold a token if each request of `lengths` has so many computed; shared ones count once."""

    def reset(self) -> None:
        """Take back all blocks, and forget noted moves."""
