"""From plain data to tensors: positions, tables, slots, and whose logits are asked for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from m4_radix_cache.forward_batch import ForwardBatch, extend_positions
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ForwardMode, ModelWorkerBatch
from tests.testbed.fakes import CPU
from tests.testbed.radix import make_radix_bed


def holder(page_size: int, *rows: list[int]) -> Any:
    """A runner as far as its tables: row 1 and following hold these slots."""
    pool = ReqToTokenPool(size=len(rows) + 1, max_context_len=32)
    pool.alloc(len(rows) + 1)
    for row, slots in enumerate(rows, start=1):
        pool.write(row, 0, np.array(slots))
    return SimpleNamespace(device=CPU, page_size=page_size, req_to_token_pool=pool)


def batch_of(mode: ForwardMode, lens: dict[str, tuple[int, int]], slots: list[int]) -> ModelWorkerBatch:
    """Requests with so many tokens that have KV, and so many in all after the step."""
    prefix_lens, seq_lens = [prefix for prefix, _ in lens.values()], [seq for _, seq in lens.values()]
    extend_lens = [seq - prefix for prefix, seq in lens.values()]
    is_extend = mode is ForwardMode.EXTEND
    return ModelWorkerBatch(
        forward_mode=mode,
        rids=list(lens),
        input_ids=np.arange(100, 100 + sum(extend_lens)),
        req_pool_indices=np.arange(1, 1 + len(lens)),
        seq_lens=np.array(seq_lens),
        out_cache_loc=np.array(slots),
        prefix_lens=prefix_lens if is_extend else None,
        extend_lens=extend_lens if is_extend else None,
        prompts_to_rate={},
        sample_lens=[1] * len(lens),
        num_prompt_tokens=sum(extend_lens) if is_extend else 0,
        sampling_info=None,  # type: ignore[arg-type]
    )


def test_the_positions_of_an_extend() -> None:
    positions, ends = extend_positions([3, 0], [2, 2])
    assert positions.tolist() == [3, 4, 0, 1] and ends.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("prefix_lens", "extend_lens"), [([0], [1]), ([0, 0, 0], [5, 1, 1]), ([7, 16, 0, 3], [9, 2, 1, 1])]
)
def test_positions_are_what_a_loop_over_requests_would_count(prefix_lens: list[int], extend_lens: list[int]) -> None:
    positions, ends = extend_positions(prefix_lens, extend_lens)
    pairs = list(zip(prefix_lens, extend_lens, strict=True))
    assert positions.tolist() == [prefix + i for prefix, count in pairs for i in range(count)]
    assert ends.tolist() == [sum(extend_lens[: i + 1]) for i in range(len(pairs))]


def test_an_extend_as_tensors() -> None:
    runner = holder(2, [8, 9, 4, 5, 6], [12, 13])
    batch = ForwardBatch.init_new(batch_of(ForwardMode.EXTEND, {"a": (3, 5), "b": (0, 2)}, [5, 6, 12, 13]), runner)
    assert batch.forward_mode is ForwardMode.EXTEND and batch.batch_size == 2
    assert batch.input_ids.tolist() == [100, 101, 102, 103] and batch.positions.tolist() == [3, 4, 0, 1]
    assert batch.logits_indices is not None and batch.logits_indices.tolist() == [1, 3]
    metadata = batch.attn_metadata
    assert metadata.slot_mapping.tolist() == [5, 6, 12, 13]
    assert metadata.block_tables.tolist() == [[4, 2, 3], [6, 0, 0]], "what is not used points at page 0"
    assert metadata.seq_lens.tolist() == [5, 2]
    assert metadata.query_lens_host == (2, 2) and metadata.num_prefills == 2
    assert (batch.input_ids.dtype, metadata.block_tables.dtype) == (torch.int64, torch.int32)


def test_a_decode_starts_where_the_kv_ends() -> None:
    """Prompts of 9, 3 and 5 tokens after one output each."""
    rows = [list(range(4, 14)), list(range(16, 20)), list(range(24, 30))]
    lens = {"a": (9, 10), "b": (3, 4), "c": (5, 6)}
    batch = ForwardBatch.init_new(batch_of(ForwardMode.DECODE, lens, [13, 19, 29]), holder(4, *rows))
    assert batch.positions.tolist() == [9, 3, 5]
    assert batch.logits_indices is None and batch.forward_mode is ForwardMode.DECODE, (
        "one row each, and all are asked for"
    )
    metadata = batch.attn_metadata
    assert metadata.seq_lens.tolist() == [10, 4, 6]
    assert (metadata.num_prefills, metadata.num_decodes) == (0, 3)


def test_two_rows_may_point_at_one_page() -> None:
    """The device sees tables and never learns that pages are shared."""
    runner = holder(2, [8, 9, 4], [8, 9, 6])
    batch = ForwardBatch.init_new(batch_of(ForwardMode.DECODE, {"a": (2, 3), "b": (2, 3)}, [4, 6]), runner)
    assert batch.attn_metadata.block_tables.tolist() == [[4, 2], [4, 3]]


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_example_on_its_way_through_the_scheduler(page_size: int) -> None:
    bed = make_radix_bed(page_size=page_size, num_tokens=64)
    for length in (9, 3, 5):
        bed.add(length)
    positions = []
    for _ in range(2):
        batch = bed.schedule()
        forward = ForwardBatch.init_new(batch.get_model_worker_batch(), bed.runner)
        positions.append(forward.positions.tolist())
        bed.update(batch, bed.execute(batch))
    assert positions == [[*range(9), *range(3), *range(5)], [9, 3, 5]]
    bed.drain()
