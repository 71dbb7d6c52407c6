"""One step as tensors: every token in one flat row, its position, its slot, and what attention must know."""

import numpy as np
import torch
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m3_paged_attention.input_batch import BatchRow, CachedRequestState
from m3_paged_attention.model_input import make_model_input
from m3_paged_attention.scheduler_output import NewRequestData

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def row(table_row: int, start: int, num_tokens: int, *, first_token: int = 0) -> BatchRow:
    """A request with tokens `first_token`, `first_token + 1`, ..."""
    prompt = list(range(first_token, first_token + start + num_tokens))
    data = NewRequestData(f"r{table_row}", prompt, SamplingParams(), 0, frozenset(), [])
    return BatchRow(CachedRequestState(data, table_row), start, num_tokens, start == 0)


TABLES = np.array([[5, 6, 7, 0], [1, 2, 0, 0], [9, 3, 0, 0]], dtype=np.int32)


def test_the_kinds_of_numbers() -> None:
    made = make_model_input([row(0, 0, 5), row(1, 3, 1)], TABLES, BLOCK_SIZE)
    metadata = made.attn_metadata
    for tensor in (made.input_ids, made.positions, made.logits_indices, metadata.slot_mapping):
        assert tensor.dtype == torch.int64
    for tensor in (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_a_step_is_not_changed_by_what_the_runner_learns_later() -> None:
    tables = TABLES.copy()
    made = make_model_input([row(0, 8, 1), row(1, 7, 1)], tables, BLOCK_SIZE)
    tables[:] = 99
    assert 99 not in made.attn_metadata.block_tables


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 16])
)
def test_every_token_has_the_place_that_a_loop_gives_it(lens: list[tuple[int, int]], block_size: int) -> None:
    lens.sort(key=lambda one: one[1] == 1)
    width = 32
    tables = np.random.default_rng(len(lens)).permutation(len(lens) * width).reshape(len(lens), width) + 1
    rows = [row(number, start, count, first_token=100 * number) for number, (start, count) in enumerate(lens)]
    made = make_model_input(rows, tables.astype(np.int32), block_size)
    places = [(number, place) for number, (start, count) in enumerate(lens) for place in range(start, start + count)]
    assert made.input_ids.tolist() == [100 * number + place for number, place in places]
    assert made.positions.tolist() == [place for _, place in places]
    slots = [int(tables[number, place // block_size]) * block_size + place % block_size for number, place in places]
    assert made.attn_metadata.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    counts = [count for _, count in lens]
    prefills = [count for count in counts if count > 1]
    metadata = made.attn_metadata
    assert metadata.query_start_loc.tolist() == [sum(counts[:number]) for number in range(len(counts) + 1)]
    assert metadata.query_lens_host == tuple(counts)
    widest = max(-(-sum(pair) // block_size) for pair in lens)
    assert metadata.block_tables.tolist() == tables[:, :widest].tolist(), "in the order of the rows"
    assert metadata.seq_lens.tolist() == [sum(pair) for pair in lens] == list(metadata.seq_lens_host)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (len(prefills), sum(prefills))
    assert (metadata.num_decodes, metadata.max_query_len) == (len(counts) - len(prefills), max(counts))
    last = made.logits_indices
    assert last is None if not prefills else last.tolist() == [end - 1 for end in np.cumsum(counts).tolist()]
