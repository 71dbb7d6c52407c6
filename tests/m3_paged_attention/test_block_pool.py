"""Blocks by number: handed out once, counted by their holders, free again after the last of them."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.errors import OutOfBlocksError


def test_whoever_was_freed_first_is_handed_out_first() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    assert pool.free([3, 1]) == [3, 1] and pool.free([2]) == [2]
    assert pool.allocate(3) == [3, 1, 2]


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.free([1])
    with pytest.raises(ValueError, match="already freed"):
        pool.free([1])
    with pytest.raises(ValueError, match="already freed"):
        pool.free([2, 2])


@pytest.mark.parametrize("holders", [{}, {1: 2}, {1: 1, 2: 1}, {2: 1}], ids=str)
def test_the_invariants_notice_holders_that_were_not_counted(holders: dict[int, int]) -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.check_invariants({1: 1})
    with pytest.raises(AssertionError):
        pool.check_invariants(holders)


def test_the_invariants_notice_a_lost_block_and_one_that_is_free_twice() -> None:
    for spoil in (lambda free: free.pop(), lambda free: free.append(2), lambda free: free.append(1)):
        pool = BlockPool(3)
        pool.allocate(1)
        spoil(pool._free)
        with pytest.raises(AssertionError):
            pool.check_invariants({1: 1})


VERBS = st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 7)), max_size=40)


@given(num_blocks=st.integers(1, 6), verbs=VERBS)
def test_free_and_used_blocks_are_disjoint_and_together_all(num_blocks: int, verbs: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(num_blocks), Counter[int]()
    for verb, number in verbs:
        if verb == "allocate":
            free = num_blocks - len(held)
            if number > free:
                message = f"{number} blocks are needed, {free} of {num_blocks} are free"
                with pytest.raises(OutOfBlocksError, match=message):
                    pool.allocate(number)
            else:
                new = pool.allocate(number)
                assert len(set(new)) == number and not held.keys() & set(new)
                assert set(new) <= set(range(1, num_blocks + 1))
                held.update(new)
        elif number not in held:
            with pytest.raises(ValueError):
                getattr(pool, verb)([number])
        elif verb == "share":
            pool.share([number])
            held[number] += 1
        else:
            last = held[number] == 1
            assert pool.free([number]) == ([number] if last else [])
            held[number] -= 1
            held += Counter()  # drops what is 0
        pool.check_invariants(held)
        assert pool.num_free == num_blocks - len(held)
        assert [pool.ref_count(block_id) for block_id in range(8)] == [held[block_id] for block_id in range(8)]
