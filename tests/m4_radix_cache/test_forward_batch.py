"""From plain data to tensors: positions, tables, slots, and the rows with logits.

Every step of the test-bed with `tensors=True` is compared with a layout that is made by loops (`RadixRunner`). Here is
the example with numbers, and the other metadata of the kernels.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m4_radix_cache.forward_batch import ForwardBatch, extend_positions
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ForwardMode
from tests.testbed.fakes import CPU


def layout(prefix_lens: list[int] | None, rows: dict[int, list[int]], page_size: int = 2) -> ForwardBatch:
    """Requests with these slots and prefixes as tensors; without prefixes, a decode of their last tokens."""
    pool = ReqToTokenPool(size=4, max_context_len=32)
    pool.alloc(4)
    for row, slots in rows.items():
        pool.write(row, 0, np.array(slots))
    lens = [len(slots) for slots in rows.values()]
    starts = [length - 1 for length in lens] if prefix_lens is None else prefix_lens
    out = [slot for start, slots in zip(starts, rows.values(), strict=True) for slot in slots[start:]]
    batch: Any = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if prefix_lens is None else ForwardMode.EXTEND,
        rids=[str(row) for row in rows],
        input_ids=np.arange(100, 100 + len(out)),
        req_pool_indices=np.array(list(rows)),
        seq_lens=np.array(lens),
        out_cache_loc=np.array(out),
        prefix_lens=prefix_lens,
        extend_lens=prefix_lens and [length - start for length, start in zip(lens, starts, strict=True)],
    )
    runner: Any = SimpleNamespace(device=CPU, page_size=page_size, req_to_token_pool=pool)
    return ForwardBatch.init_new(batch, runner)


@pytest.mark.parametrize(
    ("prefix_lens", "extend_lens"), [([0], [1]), ([0, 0, 0], [5, 1, 1]), ([7, 16, 0, 3], [9, 2, 1, 1])]
)
def test_positions_are_what_a_loop_over_requests_would_count(prefix_lens: list[int], extend_lens: list[int]) -> None:
    positions, ends = extend_positions(prefix_lens, extend_lens)
    pairs = list(zip(prefix_lens, extend_lens, strict=True))
    assert positions.tolist() == [prefix + i for prefix, count in pairs for i in range(count)]
    assert ends.tolist() == [sum(extend_lens[: i + 1]) for i in range(len(pairs))]


def test_an_extend_as_tensors() -> None:
    batch = layout([3, 0], {1: [8, 9, 4, 5, 6], 2: [12, 13]})
    assert batch.forward_mode is ForwardMode.EXTEND and batch.batch_size == 2
    assert batch.input_ids.tolist() == [100, 101, 102, 103] and batch.positions.tolist() == [3, 4, 0, 1]
    assert batch.logits_indices is not None and batch.logits_indices.tolist() == [1, 3]
    metadata = batch.attn_metadata
    assert metadata.slot_mapping.tolist() == [5, 6, 12, 13]
    assert metadata.block_tables.tolist() == [[4, 2, 3], [6, 0, 0]], "what is not used points at page 0"
    assert metadata.seq_lens.tolist() == [5, 2]
    assert metadata.query_lens_host == (2, 2) and metadata.num_prefills == 2
    assert (batch.input_ids.dtype, metadata.block_tables.dtype) == (torch.int64, torch.int32)


def test_a_decode_as_tensors() -> None:
    """One row each, and all logits are asked for. Two rows share a page, of which the device never learns."""
    batch = layout(None, {1: [8, 9, 4], 2: [8, 9, 6], 3: [12]})
    assert batch.forward_mode is ForwardMode.DECODE and batch.logits_indices is None
    assert batch.positions.tolist() == [2, 2, 0]
    metadata = batch.attn_metadata
    assert metadata.block_tables.tolist() == [[4, 2], [4, 3], [6, 0]] and metadata.seq_lens.tolist() == [3, 3, 1]
    assert (metadata.num_prefills, metadata.num_decodes) == (0, 3)
