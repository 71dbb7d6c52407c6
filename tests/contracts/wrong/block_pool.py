"""Typical mistakes in a block pool, each with the hint that it must get."""

from collections.abc import Iterable

from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.errors import OutOfBlocksError


class FreesAtOnce(BlockPool):
    """A block is free as soon as one holder frees it."""

    def free(self, block_ids: Iterable[int]) -> list[int]:
        block_ids = list(block_ids)
        for block_id in block_ids:
            self._ref_counts[block_id] = min(1, self._num_holders(block_id))
        return super().free(block_ids)


class TakesWhatIsThere(BlockPool):
    """An allocation that fails has taken the blocks that were free."""

    def allocate(self, count: int) -> list[int]:
        return [block_id for _ in range(count) for block_id in super(TakesWhatIsThere, self).allocate(1)]


class NewestFirst(BlockPool):
    """The block that was freed last is allocated first: a stack."""

    def free(self, block_ids: Iterable[int]) -> list[int]:
        freed = super().free(block_ids)
        for block_id in freed:
            self._free.remove(block_id)
            self._free.appendleft(block_id)
        return freed


class FreesTwice(BlockPool):
    """A block that nobody holds is freed once more."""

    def free(self, block_ids: Iterable[int]) -> list[int]:
        freed = []
        for block_id in block_ids:
            holders = self._ref_counts.pop(block_id, 1) - 1
            if holders > 0:
                self._ref_counts[block_id] = holders
            else:
                self._free.append(block_id)
                freed.append(block_id)
        return freed


class CountsHoldersNotBlocks(BlockPool):
    """`num_shared` adds up the holders."""

    @property
    def num_shared(self) -> int:
        return sum(count - 1 for count in self._ref_counts.values())


class LooksAtTheIdsOnce(BlockPool):
    """The counts of all blocks are read before the first one is written."""

    def share(self, block_ids: Iterable[int]) -> None:
        self._ref_counts |= {block_id: self._num_holders(block_id) + 1 for block_id in block_ids}


class ZeroIsNoBlock(BlockPool):
    """An id is tested as if it were a truth value."""

    def ref_count(self, block_id: int) -> int:
        return super().ref_count(block_id) if block_id else 0


class LastBlockIsKept(BlockPool):
    """The last free block is never allocated."""

    def allocate(self, count: int) -> list[int]:
        if count >= self.num_free:
            raise OutOfBlocksError("too few")
        return super().allocate(count)


class EmptiesTheList(BlockPool):
    """The list of the caller is used up."""

    def free(self, block_ids: Iterable[int]) -> list[int]:
        assert isinstance(block_ids, list)
        freed = []
        while block_ids:
            freed += super().free([block_ids.pop(0)])
        return freed


WRONG = [
    (FreesAtOnce, "so it is free only after the last of them"),
    (TakesWhatIsThere, "an allocation that fails changes nothing"),
    (NewestFirst, "The free blocks are a queue"),
    (FreesTwice, "Look it up before you count"),
    (CountsHoldersNotBlocks, "It counts blocks, not holders"),
    (LooksAtTheIdsOnce, "the second time the count has changed"),
    (ZeroIsNoBlock, "compare with None"),
    (LastBlockIsKept, "that is enough"),
    (EmptiesTheList, "the caller's block table"),
]
