"""Rows of slots: handed out empty, written and read, taken back once."""

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


def test_a_row_holds_what_was_written_and_reading_copies_it() -> None:
    pool = ReqToTokenPool(size=2, max_context_len=6)
    (row,) = pool.alloc(1) or []
    pool.write(row, 1, np.array([7, 8, 9]))
    slots = pool.read(row, 0, 5)
    assert slots.dtype == np.int64 and slots.tolist() == [0, 7, 8, 9, 0]
    slots[:] = 1
    assert pool.read(row, 0, 6).tolist() == [0, 7, 8, 9, 0, 0]
    assert pool.req_to_token.dtype == np.int32 and pool.req_to_token.shape == (2, 6)


def test_a_row_knows_how_many_tokens_have_a_slot() -> None:
    pool = ReqToTokenPool(size=2, max_context_len=6)
    pool.alloc(2)
    pool.write(1, 0, np.array([4, 5]))
    pool.write(1, 2, np.array([6]))
    pool.write(1, 0, np.array([8, 9]))  # what the cache had already: the row is as long as before
    assert pool.lens.tolist() == [0, 3] and pool.read(1, 0, 3).tolist() == [8, 9, 6]
    pool.free(1)
    pool.alloc(1)
    assert pool.lens.tolist() == [0, 0]


def test_a_step_of_decodes_appends_one_slot_to_each_row() -> None:
    pool = ReqToTokenPool(size=3, max_context_len=6)
    pool.alloc(3)
    pool.write(0, 0, np.array([4]))
    pool.write(2, 0, np.array([8, 9]))
    pool.append(np.array([2, 0]), np.array([10, 5]))
    assert pool.lens.tolist() == [2, 0, 3]
    assert [pool.read(row, 0, 4).tolist() for row in range(3)] == [[4, 5, 0, 0], [0, 0, 0, 0], [8, 9, 10, 0]]


def test_page_tables_name_the_page_of_every_token_and_page_0_behind_the_last() -> None:
    pool = ReqToTokenPool(size=2, max_context_len=8)
    pool.alloc(2)
    pool.write(0, 0, np.array([8, 9, 6, 7, 10]))
    pool.write(1, 0, np.array([4]))
    tables = pool.page_tables(np.array([1, 0]), 5, 2)
    assert tables.dtype == np.int32 and tables.tolist() == [[2, 0, 0], [4, 3, 5]]


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
