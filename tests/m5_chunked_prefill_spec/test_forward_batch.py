"""A step as tensors: what it is made of.

The layout of rows in any order: every step of the test-bed with `tensors=True` is compared with one that is made by
loops (`PiecesRunner`). Of a draft model the KV is compared with that of a forward (`test_draft_model.py`).
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from m5_chunked_prefill_spec.forward_batch import ForwardBatch, nothing_in_page_0, ranges
from tests.testbed.fakes import CPU


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1))
def test_ranges_are_what_a_loop_would_count(pairs: list[tuple[int, int]]) -> None:
    """Of length 0 too: a piece of a prompt has no logits that are looked at."""
    starts, lens = (np.array(column) for column in zip(*pairs, strict=True))
    assert ranges(starts, lens).tolist() == [start + i for start, count in pairs for i in range(count)]


def test_tokens_that_only_show_what_they_cost_lie_in_page_0() -> None:
    tokens = nothing_in_page_0(2, 3, 10, 4)
    runner: Any = SimpleNamespace(device=CPU, page_size=4, req_to_token_pool=None)
    layout = ForwardBatch.init_new(tokens, runner)
    metadata: Any = layout.attn_metadata
    assert layout.positions.tolist() == [10, 11, 12] * 2
    assert not metadata.block_tables.any() and set(metadata.slot_mapping.tolist()) <= set(range(4))
