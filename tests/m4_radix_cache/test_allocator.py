"""Slots in pages: against an allocator that thinks token by token, and against everybody who frees what is not his."""

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from tests.support.amounts import examples

PAGE_SIZES = [1, 2, 4, 16]


def checked(num_pages: int, page_size: int) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size=num_pages * page_size, page_size=page_size, checked=True)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


# --- handing out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (4, 0), (-4, 4), (6, 4), (2, 4)])
def test_a_size_that_is_no_whole_number_of_pages_is_refused(size: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"size={size} is no positive multiple of page_size={page_size}"):
        TokenToKVPoolAllocator(size=size, page_size=page_size)


def test_a_decode_leaves_the_array_of_last_slots_alone() -> None:
    last = ints(4, 7)
    checked(8, 4).alloc_decode(ints(2, 5), last)
    assert last.tolist() == [4, 7]


class SlowAllocator:
    """Token by token, in words."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size, self.free = page_size, deque(range(1, num_pages + 1))

    def extend(self, prefix_len: int, seq_len: int, last_loc: int) -> list[int]:
        slots = []
        for position in range(prefix_len, seq_len):
            starts_page = position % self.page_size == 0
            last_loc = self.free.popleft() * self.page_size if starts_page else last_loc + 1
            slots.append(last_loc)
        return slots


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """A page size, and batches of (request, tokens more)."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    growth = st.integers(0, 3 * page_size + 1)
    batch = st.lists(st.tuples(st.integers(0, 4), growth), max_size=5, unique_by=lambda pair: pair[0])
    return page_size, draw(st.lists(batch, min_size=1, max_size=8))


@settings(max_examples=examples(300))
@given(history=histories(), num_pages=st.integers(1, 40), decodes=st.booleans())
def test_whole_batches_get_what_a_slow_allocator_gives_token_by_token(
    history: tuple[int, list[list[tuple[int, int]]]], num_pages: int, decodes: bool
) -> None:
    """And where there is too little, nobody gets anything and the next question is answered as if it never was."""
    page_size, batches = history
    allocator, slow = checked(num_pages, page_size), SlowAllocator(num_pages, page_size)
    slots_of: dict[int, list[int]] = {number: [] for number in range(5)}
    for batch in batches:
        growths = [(number, 1 if decodes else more) for number, more in batch]
        prefix = [len(slots_of[number]) for number, _ in growths]
        lengths = [len(slots_of[number]) + more for number, more in growths]
        last = [slots_of[number][-1] if slots_of[number] else -1 for number, _ in growths]
        arguments = ints(*lengths), ints(*last)
        if decodes:
            needed, got = allocator.num_pages_for_decode(arguments[0]), allocator.alloc_decode(*arguments)
        else:
            needed = allocator.num_pages_for_extend(ints(*prefix), arguments[0])
            got = allocator.alloc_extend(ints(*prefix), *arguments)
        if needed > len(slow.free):
            assert got is None
        else:
            expected = [slow.extend(*one) for one in zip(prefix, lengths, last, strict=True)]
            assert got is not None and got.dtype == np.int64
            assert got.tolist() == [slot for slots in expected for slot in slots]
            for (number, _), slots in zip(growths, expected, strict=True):
                slots_of[number] += slots
        assert allocator.available_size() == len(slow.free) * page_size
        assert not set(allocator.owned_pages().tolist()) & set(slow.free)


# --- taking back ------------------------------------------------------------------------------------------------------


WRONG = {
    "twice": (ints(4), "page 1 is not in use: it was freed already"),
    "of a page never handed out": (ints(17), "page 4 is not in use"),
    "one of several": (ints(8, 9, 4), "page 1 is not in use"),
    "slot 0": (ints(0), "slot 0 lies in page 0"),
    "another slot of page 0": (ints(8, 3), "slot 3 lies in page 0"),
    "slot -1": (ints(-1), "slot -1 does not exist"),
    "beyond the end": (ints(8, 24), "slot 24 does not exist"),
    "the same slot twice at once": (ints(8, 9, 8), "slot 8 is freed twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_free_raises_and_changes_nothing(name: str) -> None:
    slots, message = WRONG[name]
    allocator = checked(5, 4)
    allocator.alloc(12)
    allocator.free(ints(4, 5, 6, 7))
    with pytest.raises(PoolError, match=message):
        allocator.free(slots)
    assert allocator.available_size() == 12 and allocator.owned_pages().tolist() == [2, 3]


def test_more_free_pages_than_there_are_are_noticed_unchecked() -> None:
    allocator = TokenToKVPoolAllocator(size=4, page_size=1)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(ints(1))


def test_clear_takes_everything_back() -> None:
    allocator = checked(3, 2)
    allocator.alloc(4)
    allocator.free(ints(2, 3))
    allocator.clear()
    assert allocator.available_size() == 6 and not len(allocator.owned_pages())
    assert allocator.alloc(6).tolist() == [2, 3, 4, 5, 6, 7]
    allocator.free(ints(4))
    assert allocator.available_size() == 2


@given(page_size=st.sampled_from(PAGE_SIZES), num_pages=st.integers(1, 8), verbs=st.lists(st.integers(-4, 8)))
def test_free_and_used_pages_are_disjoint_and_together_all(page_size: int, num_pages: int, verbs: list[int]) -> None:
    """A positive number allocates so many pages, a negative one frees the oldest."""
    allocator, held, queue = checked(num_pages, page_size), list[int](), deque(range(1, num_pages + 1))
    for number in verbs:
        if number >= 0:
            slots = allocator.alloc(number * page_size)
            assert (slots is None) == (number > len(queue))
            if slots is not None:
                pages = [queue.popleft() for _ in range(number)]
                assert slots.tolist() == [page * page_size + offset for page in pages for offset in range(page_size)]
                held += pages
        else:
            gone, held = sorted(held[:-number]), held[-number:]
            allocator.free(ints(*(page * page_size for page in gone)))
            queue.extend(gone)
        assert allocator.available_size() == len(queue) * page_size
        assert allocator.owned_pages().tolist() == sorted(held)
