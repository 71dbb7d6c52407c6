"""Block pool: the free blocks, and the reference count of each block in use.

m2 had slots, one request in each. Several requests may hold a block, because forked requests share their common
blocks; the block is free when the last of them frees it. Block 0 is never allocated: padding is written there. The pool
stores only block ids, neither requests nor tensors. vLLM: `v1/core/block_pool.py`; SGLang:
`TokenToKVPoolAllocator`.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from m3_paged_attention.errors import OutOfBlocksError

Pairs = list[tuple[int, int]]
"""Pairs of block ids (source, target) for copying data."""


class BlockMoves(NamedTuple):
    """Data to be moved before the next forward: swap in, then swap out, then copy.

    Within one list all sources are read before any target is written; no block is a target twice.
    """

    swap_in: Pairs  # (host block, device block)
    swap_out: Pairs  # (device block, host block)
    copies: Pairs  # (source, target), both on the device


class BlockUsage(NamedTuple):
    """The device's blocks, block 0 not counted."""

    num_blocks: int
    num_free: int
    num_used: int
    num_shared: int
    """Used blocks that are in more than one table."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens` tokens, rounded up."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Pool of `num_blocks` blocks with ids from `first_id` on. The block freed first is allocated first."""

    def __init__(self, num_blocks: int, *, first_id: int = 1) -> None:
        self.num_blocks = num_blocks
        self._all = range(first_id, first_id + num_blocks)
        self._free = deque(self._all)
        self._ref_counts: dict[int, int] = {}  # block id -> number of holders, for each block in use

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Number of blocks with more than one holder."""
        return sum(count > 1 for count in self._ref_counts.values())

    def ref_count(self, block_id: int) -> int:
        """Return the number of holders of a block; 0 for a free block."""
        return self._ref_counts.get(block_id, 0)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one holder. Raises `OutOfBlocksError` and allocates none if too few."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks are needed, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block. Raises `ValueError` for a block that is not in use."""
        for block_id in block_ids:
            self._ref_counts[block_id] = self._num_holders(block_id) + 1

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one holder from each block; return the blocks that are free now.

        Raises `ValueError` for a block that is not in use: it was already freed, or never allocated.
        """
        freed = []
        for block_id in block_ids:
            holders = self._num_holders(block_id) - 1
            if holders:
                self._ref_counts[block_id] = holders
                continue
            del self._ref_counts[block_id]
            self._free.append(block_id)
            freed.append(block_id)
        return freed

    def check_invariants(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless the reference counts equal `holders` and all other blocks are free."""
        assert self._ref_counts == holders, f"counted {self._ref_counts}, but the tables hold {dict(holders)}"
        free = set(self._free)
        assert len(free) == len(self._free), f"a block is free twice: {list(self._free)}"
        assert not free & self._ref_counts.keys(), f"both free and in use: {free & self._ref_counts.keys()}"
        assert free | self._ref_counts.keys() == set(self._all), "free and used blocks together are not all"

    def _num_holders(self, block_id: int) -> int:
        holders = self._ref_counts.get(block_id)
        if holders is None:
            raise ValueError(f"block {block_id} is not in use: it was already freed, or never allocated")
        return holders
