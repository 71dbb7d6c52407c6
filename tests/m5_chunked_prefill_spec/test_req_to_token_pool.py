"""Rows that grow by several tokens at once, and shrink again where guesses were wrong."""

import random

import numpy as np
import pytest

from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_that_grow_and_shrink_at_random_hold_what_a_list_would(page_size: int) -> None:
    """Where a row shrinks, whole pages are free again; the rest of the page of its last token goes on being its own."""
    rng, width = random.Random(page_size), 64
    pool = ReqToTokenPool(size=3, max_context_len=width)
    pool.alloc(3)
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
