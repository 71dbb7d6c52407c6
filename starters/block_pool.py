"""Build the block pool of m3: the free blocks of the KV memory, and the number of holders of each block in use.

Requests that fork read the same blocks, so a block may have several holders. A block that is free too early is given to
another request, which writes over KV that is still read: the answer gets wrong, much later and without an error. So the
pool counts holders, and raises an error at once for a block that nobody holds. It stores block ids only: no requests,
no tensors.

Explained in docs/m3_paged_attention.md#blockpool-free-blocks-and-reference-counts.

    cp starters/block_pool.py my_pool.py
    pytest --part block_pool=my_pool.py:MyBlockPool
"""

from collections.abc import Iterable, Mapping

from m3_paged_attention.errors import OutOfBlocksError  # noqa: F401 - you raise it


class MyBlockPool:
    """Pool of `num_blocks` blocks, with the ids `first_id`, `first_id + 1`, and so on. On the device the ids begin with
    1, because padding is written to block 0: no request may get it. A pool of the host's blocks begins with 0.

    A block is free, or it is in use and has one holder or more. Free blocks are a queue: the block that was freed first
    is allocated first. (The engine needs no particular order: with a stack its answers are the same. This one is fixed
    so that ids can be compared.)

    Other parts read the lists that you return and change them, for example as the block table of a request. So return
    new lists, and leave those that you get as they are.
    """

    def __init__(self, num_blocks: int, *, first_id: int = 1) -> None:
        """Begin with all blocks free, the smallest id first in the queue."""
        self.num_blocks = num_blocks
        self.ids = range(first_id, first_id + num_blocks)
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        raise NotImplementedError

    @property
    def num_shared(self) -> int:
        """Number of blocks with more than one holder."""
        raise NotImplementedError

    def ref_count(self, block_id: int) -> int:
        """Return the number of holders of a block; 0 for a block that is free or that the pool does not have."""
        raise NotImplementedError

    def allocate(self, count: int) -> list[int]:
        """Take the first `count` free blocks, give each one holder, and return them in this order.

        Raises `OutOfBlocksError` if fewer are free, and then changes nothing. A `count` of 0 is always possible.
        """
        raise NotImplementedError

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; two to a block that is listed twice.

        Raises `ValueError` for a block that is not in use: free, or not of this pool. Such a call is a defect of the
        caller. It changes nothing about this block; what becomes of the blocks before it in the list is not tested:
        they may have a holder more, or not.
        """
        raise NotImplementedError

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Remove one holder from each block; two from a block that is listed twice.

        Returns the blocks that are free now, in the order of `block_ids`. In this order they go to the end of the
        queue. Raises `ValueError` for a block that is not in use; it is not added to the queue a second time. So
        `allocate` changes nothing if it raises an error; `free`, like `share`, may have changed the blocks before.
        """
        raise NotImplementedError

    def check_invariants(self, holders: Mapping[int, int]) -> None:
        """Given. Raise AssertionError unless the reference counts equal `holders` and all other blocks are free."""
        counted = {block_id: count for block_id in self.ids if (count := self.ref_count(block_id))}
        assert counted == holders, f"counted {counted}, but the tables hold {dict(holders)}"
        num_free = self.num_blocks - len(counted)
        assert self.num_free == num_free, f"{self.num_free} blocks are free, and {num_free} have no holder"
