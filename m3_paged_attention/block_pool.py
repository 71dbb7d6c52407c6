"""The blocks themselves: which are free, and how many requests hold each of the others.

m2 had slots, one request in each. A block may have several holders, because forked requests share what they have in
common; it is free again when the last of them lets go. Block 0 is never handed out: padding is written there. The pool
knows numbers only, neither requests nor tensors. vLLM: `v1/core/block_pool.py`; SGLang: `PagedTokenToKVPoolAllocator`.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from m3_paged_attention.errors import OutOfBlocksError

Pairs = list[tuple[int, int]]
"""Block ids: from which one to which other data is moved."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill; the last one perhaps in part."""
    return -(-num_tokens // block_size)


class BlockPool:
    """`num_blocks` blocks with ids from `first_id` on. Whoever was freed first is handed out first."""

    def __init__(self, num_blocks: int, *, first_id: int = 1) -> None:
        self.num_blocks = num_blocks
        self._all = range(first_id, first_id + num_blocks)
        self._free = deque(self._all)
        self._ref_counts: dict[int, int] = {}  # blocks in use, and how many hold each

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks with more than one holder."""
        return sum(count > 1 for count in self._ref_counts.values())

    def ref_count(self, block_id: int) -> int:
        """How many hold this block; 0 for one that is free."""
        return self._ref_counts.get(block_id, 0)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one holder. Raises `OutOfBlocksError`, and then hands out none."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks are needed, {len(self._free)} of {self.num_blocks} are free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Count one holder more for each. Raises `ValueError` for a block that nobody holds."""
        for block_id in block_ids:
            self._ref_counts[block_id] = self._held(block_id) + 1

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Count one holder less for each; returns those that are free now.

        Raises `ValueError` for a block that nobody holds: it was freed twice, or never handed out.
        """
        freed = []
        for block_id in block_ids:
            holders = self._held(block_id) - 1
            if holders:
                self._ref_counts[block_id] = holders
                continue
            del self._ref_counts[block_id]
            self._free.append(block_id)
            freed.append(block_id)
        return freed

    def check_invariants(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless exactly the blocks of `holders` are in use, and by so many; all others free."""
        assert self._ref_counts == holders, f"counted {self._ref_counts}, but the tables hold {dict(holders)}"
        free = set(self._free)
        assert len(free) == len(self._free), f"a block is free twice: {list(self._free)}"
        assert not free & self._ref_counts.keys(), f"both free and in use: {free & self._ref_counts.keys()}"
        assert free | self._ref_counts.keys() == set(self._all), "free and used blocks together are not all"

    def _held(self, block_id: int) -> int:
        holders = self._ref_counts.get(block_id)
        if holders is None:
            raise ValueError(f"block {block_id} is not in use: it was freed already, or never handed out")
        return holders
