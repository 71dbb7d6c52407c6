"""Rows of slots: made when they are needed, handed out empty, taken back once. What they hold, the test-bed reads."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, strategies as st

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool


def test_rows_are_made_when_they_are_needed_and_keep_what_they_hold() -> None:
    pool = ReqToTokenPool(size=10**15, max_context_len=4)
    first = pool.alloc(2) or []
    pool.write(first[1], 0, np.array([7, 8, 9]))
    more = pool.alloc(500) or []
    assert sorted([*first, *more]) == list(range(502)) and pool.available_size() == 10**15 - 502
    pool.write(more[-1], 1, np.array([5]))
    assert pool.read(first[1], 0, 4).tolist() == [7, 8, 9, 0] and pool.lens[first[1]] == 3
    assert pool.read(more[-1], 0, 4).tolist() == [0, 5, 0, 0] and pool.lens[more[-1]] == 2
    with pytest.raises(PoolError):
        pool.free(10**14)
    pool.free([*first, *more])
    assert pool.available_size() == 10**15
    pool.clear()
    assert pool.available_size() == 10**15 and pool.alloc(1) == [0]


@pytest.mark.parametrize("rows", [1, [0, 1], [0, 0], -1, 3, [0, 7]], ids=str)
def test_a_wrong_free_raises_and_changes_nothing(rows: int | list[int]) -> None:
    pool = ReqToTokenPool(size=3, max_context_len=4)
    pool.alloc(2)
    pool.free(1)
    with pytest.raises(PoolError, match="freed"):
        pool.free(rows)
    assert pool.available_size() == 2
    pool.free(0)
    assert pool.alloc(3) == [2, 1, 0]


@pytest.mark.parametrize(("size", "max_context_len"), [(0, 4), (4, 0)], ids=["no row", "no token"])
def test_a_pool_without_room_is_refused(size: int, max_context_len: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ReqToTokenPool(size=size, max_context_len=max_context_len)


@given(size=st.integers(1, 5), numbers=st.lists(st.integers(-4, 4), max_size=30))
def test_rows_are_handed_out_empty_and_the_first_freed_comes_first(size: int, numbers: list[int]) -> None:
    """A positive number allocates, a negative one frees the oldest."""
    pool, held, free = ReqToTokenPool(size=size, max_context_len=2), list[int](), deque(range(size))
    for number in numbers:
        if number < 0:
            pool.free(held[:-number])
            free.extend(held[:-number])
            held = held[-number:]
        elif number > len(free):
            assert pool.alloc(number) is None, "and nothing changes"
        else:
            rows = [free.popleft() for _ in range(number)]
            assert pool.alloc(number) == rows
            for row in rows:
                assert pool.lens[row] == 0 and not pool.read(row, 0, 2).any(), "nothing of its last request"
                pool.write(row, 0, np.array([8, 9]))
            held += rows
        assert pool.available_size() == len(free)
