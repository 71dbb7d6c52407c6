"""Rows that grow by several tokens at once, and shrink again where guesses were wrong."""

import random

import numpy as np
import pytest

from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool


def pool_with(*rows: list[int], width: int = 12) -> ReqToTokenPool:
    """Row 0 and following hold these slots."""
    pool = ReqToTokenPool(size=len(rows), max_context_len=width)
    pool.alloc(len(rows))
    for row, slots in enumerate(rows):
        pool.write(row, 0, np.array(slots, dtype=np.int64))
    return pool


@pytest.mark.parametrize(
    ("page_size", "kept", "freed"),
    [
        (1, 5, [25, 26, 27, 28, 29]),
        (1, 10, []),
        (4, 5, [28, 29]),  # the rest of the page of token 4 goes on being its own
        (4, 4, [24, 25, 26, 27, 28, 29]),
        (4, 8, [28, 29]),
        (4, 9, []),
        (16, 1, []),
        (16, 0, [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]),
    ],
)
def test_what_is_cut_off_gives_back_whole_pages_only(page_size: int, kept: int, freed: list[int]) -> None:
    pool = pool_with([4, 5], list(range(20, 30)))
    assert pool.truncate(1, kept, page_size=page_size).tolist() == freed
    assert pool.lens.tolist() == [2, kept]
    assert pool.read(1, 0, 12).tolist() == list(range(20, 20 + kept)) + [0] * (12 - kept), "nothing of it is left"
    assert pool.read(0, 0, 3).tolist() == [4, 5, 0], "nor is anybody else's row changed"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_that_grow_and_shrink_at_random_hold_what_a_list_would(page_size: int) -> None:
    rng, width = random.Random(page_size), 64
    pool = pool_with([], [], [], width=width)
    lists: list[list[int]] = [[], [], []]
    for number in range(300):
        rows = rng.sample(range(3), rng.randint(1, 3))
        counts = [rng.randint(1, 5) for _ in rows]
        if all(len(lists[row]) + count <= width for row, count in zip(rows, counts, strict=True)):
            slots = [1000 * number + i for i in range(sum(counts))]
            pool.append_runs(np.array(rows), np.array(slots), np.array(counts))
            for row, count in zip(rows, counts, strict=True):
                lists[row] += slots[:count]
                del slots[:count]
        row = rng.randrange(3)
        kept = rng.randint(0, len(lists[row]))
        first_free = -(-kept // page_size) * page_size
        assert pool.truncate(row, kept, page_size=page_size).tolist() == lists[row][first_free:]
        del lists[row][kept:]
        for row, known in enumerate(lists):
            assert pool.read(row, 0, width).tolist() == known + [0] * (width - len(known))
        assert pool.lens.tolist() == [len(known) for known in lists]
