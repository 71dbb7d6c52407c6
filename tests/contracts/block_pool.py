"""Contract of the block pool of m3: free blocks, and the number of holders of each block in use."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention.errors import OutOfBlocksError
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from tests.contracts.part import Part, same

PART = Part(
    name="block_pool",
    target="m3_paged_attention.block_pool:BlockPool",
    lesson="docs/m3_paged_attention.md#blockpool-free-blocks-and-reference-counts",
    starter="MyBlockPool",
    variant="m3_paged_attention-swap",
    changes={"cache_config": {"num_blocks": 128}},
)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the name of the error that it raises."""
    try:
        return call()
    except (OutOfBlocksError, ValueError) as error:
        return type(error).__name__


def counts(pool: Any, block_ids: range) -> dict[int, int]:
    """The holders of each of these blocks."""
    return {block_id: pool.ref_count(block_id) for block_id in block_ids}


def test_blocks_are_allocated_in_order(part: Any) -> None:
    """`allocate` of a new pool returns the smallest ids, in rising order, from 1 on."""
    pool = part(5)
    hint = "A new pool has the ids first_id, first_id + 1, ...; first_id is 1 if it is not named."
    same(pool.allocate(2), [1, 2], on="pool of 5 blocks; allocate(2)", hint=hint)
    same(pool.allocate(3), [3, 4, 5], on="pool of 5 blocks; allocate(2); allocate(3)", hint=hint)


def test_free_blocks_are_counted(part: Any) -> None:
    """`num_free` is the number of free blocks: all of a new pool, and fewer after each `allocate`."""
    pool = part(5)
    same(pool.num_free, 5, on="pool of 5 blocks; num_free")
    pool.allocate(2)
    same(pool.num_free, 3, on="pool of 5 blocks; allocate(2); num_free")
    pool.allocate(0)
    same(pool.num_free, 3, on="pool of 5 blocks; allocate(2); allocate(0); num_free")


def test_a_block_that_is_allocated_has_one_holder(part: Any) -> None:
    """`ref_count` is 1 for a block that was allocated, and 0 for a free block."""
    pool = part(4)
    pool.allocate(2)
    expected = {1: 1, 2: 1, 3: 0, 4: 0}
    same(counts(pool, range(1, 5)), expected, on="pool of 4 blocks; allocate(2); ref_count of blocks 1 to 4")


def test_too_few_blocks_are_an_error(part: Any) -> None:
    """`allocate` of more blocks than are free raises `OutOfBlocksError`, and then allocates none."""
    pool = part(4)
    pool.allocate(1)
    on = "pool of 4 blocks; allocate(1); allocate(4)"
    same(outcome(lambda: pool.allocate(4)), "OutOfBlocksError", on=on, hint="Only 3 blocks are free.")
    hint = "Compare before you take the first block: an allocation that fails changes nothing."
    same(pool.num_free, 3, on=f"{on}; num_free", hint=hint)
    same(counts(pool, range(1, 5)), {1: 1, 2: 0, 3: 0, 4: 0}, on=f"{on}; ref_count of blocks 1 to 4", hint=hint)
    on, hint = f"{on}; allocate(3)", "3 blocks are needed and 3 are free: that is enough."
    same(outcome(lambda: pool.allocate(3)), [2, 3, 4], on=on, hint=hint)
    same(outcome(lambda: pool.allocate(0)), [], on=f"{on}; allocate(0)", hint="0 blocks are needed: that is enough.")


def test_freed_blocks_are_allocated_again(part: Any) -> None:
    """The block that was freed first is allocated first, after those that were free before it."""
    pool = part(4)
    pool.allocate(3)
    pool.free([3, 1])
    pool.free([2])
    on = "pool of 4 blocks; allocate(3); free([3, 1]); free([2]); allocate(4)"
    hint = "The free blocks are a queue: take at one end, and add at the other."
    same(pool.allocate(4), [4, 3, 1, 2], on=on, hint=hint)
    same(counts(pool, range(1, 5)), dict.fromkeys(range(1, 5), 1), on=f"{on}; ref_count of blocks 1 to 4")


def test_the_first_id_can_be_chosen(part: Any) -> None:
    """The ids begin with `first_id`: the pool of the host's blocks has a block 0."""
    pool = part(3, first_id=0)
    on = "pool of 3 blocks, first_id=0; allocate(3)"
    same(pool.allocate(3), [0, 1, 2], on=on)
    hint = "The id 0 is as good as any other: compare with None, or look whether an entry is there."
    same(pool.ref_count(0), 1, on=f"{on}; ref_count(0)", hint=hint)
    same(pool.free([0]), [0], on=f"{on}; free([0])", hint=hint)


def test_a_shared_block_has_more_holders(part: Any) -> None:
    """`share` adds one holder to each block: allocates none, and takes none from the free blocks."""
    pool = part(4)
    pool.allocate(3)
    pool.share([1, 3])
    pool.share([1])
    on = "pool of 4 blocks; allocate(3); share([1, 3]); share([1])"
    same(counts(pool, range(1, 5)), {1: 3, 2: 1, 3: 2, 4: 0}, on=f"{on}; ref_count of blocks 1 to 4")
    same(pool.num_free, 1, on=f"{on}; num_free")


def test_a_block_is_free_after_its_last_holder(part: Any) -> None:
    """`free` removes one holder of each block, and returns those that are free now, in the order of the call."""
    pool = part(3)
    pool.allocate(3)
    pool.share([1, 2])
    on = "pool of 3 blocks; allocate(3); share([1, 2]); free([1, 3])"
    hint = "free() removes one holder. The others still read the block, so it is free only after the last of them."
    same(pool.free([1, 3]), [3], on=on, hint=hint)
    same((pool.num_free, pool.ref_count(1)), (1, 1), on=f"{on}; num_free and ref_count(1)", hint=hint)
    same(pool.free([2, 1]), [1], on=f"{on}; free([2, 1])", hint=hint)
    same(pool.free([2]), [2], on=f"{on}; free([2, 1]); free([2])", hint=hint)
    same(counts(pool, range(1, 4)), dict.fromkeys(range(1, 4), 0), on=f"{on}; ...; ref_count of blocks 1 to 3")


def test_shared_blocks_are_counted(part: Any) -> None:
    """`num_shared` is the number of blocks with more than one holder."""
    pool = part(4)
    same(pool.num_shared, 0, on="pool of 4 blocks; num_shared")
    pool.allocate(4)
    pool.share([1, 2])
    pool.share([1])
    on, hint = "pool of 4 blocks; allocate(4); share([1, 2]); share([1])", "It counts blocks, not holders."
    same(pool.num_shared, 2, on=f"{on}; num_shared", hint=hint)
    pool.free([1, 2, 3])
    same(pool.num_shared, 1, on=f"{on}; free([1, 2, 3]); num_shared", hint="Block 1 has two holders, block 2 has one.")


def test_a_block_that_is_free_cannot_be_freed_or_shared(part: Any) -> None:
    """`free` and `share` of a block that is not in use raise `ValueError`: it is free, or not of this pool."""
    hint = "A second free() would take the block from the request that got it meanwhile. Look it up before you count."
    for name in ("free", "share"):
        for block_id in (2, 3, 0, 9, -1):
            pool = part(3)
            pool.allocate(2)
            pool.free([2])
            on = f"pool of 3 blocks; allocate(2); free([2]); {name}([{block_id}])"
            same(outcome(lambda: getattr(pool, name)([block_id])), "ValueError", on=on, hint=hint)  # noqa: B023
            same((pool.num_free, pool.ref_count(block_id)), (2, 0), on=f"{on}; num_free and its ref_count", hint=hint)


def test_a_block_may_be_named_twice(part: Any) -> None:
    """A block that is twice in one call gains or loses two holders; a third `free` is an error."""
    pool = part(2)
    pool.allocate(1)
    pool.share([1, 1])
    hint = "Go through the ids one by one: the second time the count has changed."
    on = "pool of 2 blocks; allocate(1); share([1, 1])"
    same(pool.ref_count(1), 3, on=f"{on}; ref_count(1)", hint=hint)
    same(pool.free([1, 1]), [], on=f"{on}; free([1, 1])", hint=hint)
    on = "pool of 2 blocks; allocate(1); free([1, 1])"
    pool = part(2)
    pool.allocate(1)
    same(outcome(lambda: pool.free([1, 1])), "ValueError", on=on, hint=hint)


def test_lists_belong_to_the_caller(part: Any) -> None:
    """The caller may change a list that it got, and a list that it gave is not changed."""
    pool = part(6)
    table = pool.allocate(2)
    table.append(9)
    same(pool.allocate(2), [3, 4], on="pool of 6 blocks; allocate(2); append to that list; allocate(2)")
    given = [1, 2, 3]
    freed = pool.free(given)
    hint = "The list is the caller's block table: only read it."
    same(given, [1, 2, 3], on="the list [1, 2, 3] after free of it", hint=hint)
    freed.clear()
    hint = "Return a new list: the caller changes it."
    same(pool.num_free, 5, on="... free([1, 2, 3]); clear the list that it returned; num_free", hint=hint)


def test_requests_that_fork_share_and_copy(part: Any) -> None:
    """With this pool m3's block manager shares the blocks of forks, and copies one before it is written."""
    spec = KVCacheSpec(block_size=4, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    manager = KVCacheManager(kv_cache_config=KVCacheConfig(spec=spec, num_blocks=6), tracer=Tracer())
    manager.reserve("parent", 6)
    manager.fork("parent", "child", 6)
    on = "blocks of 4 tokens; a request of 6 tokens; a fork of it"
    same(manager.block_ids("child"), manager.block_ids("parent"), on=f"{on}; the child's block table")
    same(tuple(manager.usage()), (6, 4, 2, 2), on=f"{on}; blocks: all, free, used, shared")
    same(manager.reserve("child", 7), [3], on=f"{on}; the child writes its 7th token: its new blocks")
    same(manager.reserve("parent", 7), [], on=f"{on}; both write a 7th token: the parent's new blocks")
    same(manager.take_moves().copies, [(2, 3)], on=f"{on}; both write a 7th token: copies (source, target)")
    manager.release("parent")
    same(tuple(manager.usage()), (6, 4, 2, 0), on=f"{on}; ...; the parent ends; blocks: all, free, used, shared")
    same(manager.block_ids("child"), [1, 3], on=f"{on}; ...; the parent ends; the child's block table")
    manager.check_invariants()


class Model:
    """A pool as a list of free blocks and a count of holders."""

    def __init__(self, size: int, first_id: int) -> None:
        self.ids = range(first_id, first_id + size)
        self.free_ids = list(self.ids)
        self.holders = dict.fromkeys(self.ids, 0)

    @property
    def used(self) -> list[int]:
        return [block_id for block_id, count in self.holders.items() if count]

    @property
    def on(self) -> str:
        """What a learner may know before the next call."""
        held = {block_id: self.holders[block_id] for block_id in self.used}
        return f"Before the last call these blocks are free, in this order: {self.free_ids}; holders: {held}."

    def allocate(self, count: int) -> Any:
        if count > len(self.free_ids):
            return "OutOfBlocksError"
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        self.holders |= dict.fromkeys(taken, 1)
        return taken

    def share(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.holders[block_id] += 1

    def free(self, block_ids: list[int]) -> list[int]:
        freed = [block_id for block_id in block_ids if self.holders[block_id] == 1]
        for block_id in block_ids:
            self.holders[block_id] -= 1
        self.free_ids += freed
        return freed


def any_call(rng: Random, used: list[int]) -> tuple[str, Any]:
    """The name of a method and what it is called with: nothing that is an error, except too many blocks."""
    action = rng.random()
    if action < 0.35:
        return "allocate", rng.randrange(4)
    name, most = ("share", 2) if action < 0.55 else ("free", 3)
    return name, rng.sample(used, rng.randint(0, min(most, len(used))))


def test_it_is_right_after_many_changes(part: Any) -> None:
    """After any allocations, shares and frees every number and every order is right."""
    rng, size, first = Random(3), 6, 2
    for _ in range(40):
        pool, model = part(size, first_id=first), Model(size, first)
        done = [f"pool of {size} blocks, first_id={first}"]
        for _ in range(15):
            (name, argument), hint = any_call(rng, model.used), model.on
            before = dict(model.holders)
            on = "; ".join([*done, f"{name}({argument})"])
            expected = getattr(model, name)(argument)
            same(outcome(lambda: getattr(pool, name)(argument)), expected, on=on, hint=hint)  # noqa: B023
            same(counts(pool, model.ids), model.holders, on=f"{on}; ref_count of all blocks", hint=hint)
            shared = sum(count > 1 for count in model.holders.values())
            wanted = len(model.free_ids), shared
            same((pool.num_free, pool.num_shared), wanted, on=f"{on}; num_free and num_shared", hint=hint)
            done += [f"{name}({argument})"] if model.holders != before else []
