"""What the runner gets: rows out of a decision, and padded tensors out of rows."""

import torch
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m2_continuous_batching.input_batch import InputBatch, prepare_inputs_from_scheduler_output
from m2_continuous_batching.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

CPU = torch.device("cpu")
MIXED = SchedulerOutput(
    [
        NewRequestData("new", [11, 12, 13], SamplingParams(), [2]),
        NewRequestData("wordy", [21, 22], SamplingParams(prompt_logprobs=0), [0]),
    ],
    CachedRequestData(
        req_ids=["old", "older"],
        new_token_ids=[[31], [41]],
        new_block_ids=[[], [7]],
        num_computed_tokens=[9, 4],
        num_output_tokens=[1, 2],
    ),
    {"new": 3, "wordy": 2, "old": 1, "older": 1},
    7,
    frozenset(),
)


def test_prefills_come_first_then_decodes() -> None:
    batch = prepare_inputs_from_scheduler_output(MIXED)
    assert batch == InputBatch(
        req_ids=["new", "wordy", "old", "older"],
        token_ids=[[11, 12, 13], [21, 22], [31], [41]],
        start_positions=[0, 0, 9, 4],
        is_prefill=[True, True, False, False],
        prompt_lens=[3, 2, 0, 0],
        block_ids=[[2], [0], [], [7]],
        num_logits=[1, 2, 1, 1],
    )
    assert (batch.batch_size, batch.num_tokens) == (4, 7)


def test_rows_can_be_selected_in_any_order() -> None:
    batch = prepare_inputs_from_scheduler_output(MIXED)
    assert batch.select(range(4)) == batch
    assert batch.select([3, 0]) == InputBatch(
        req_ids=["older", "new"],
        token_ids=[[41], [11, 12, 13]],
        start_positions=[4, 0],
        is_prefill=[False, True],
        prompt_lens=[0, 3],
        block_ids=[[7], [2]],
        num_logits=[1, 1],
    )
    assert batch.select([]).batch_size == 0


@given(rows=st.lists(st.tuples(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.integers(0, 50)), max_size=6))
def test_tensors_hold_the_rows_padded_on_the_right(rows: list[tuple[list[int], int]]) -> None:
    lens = [len(tokens) for tokens, _ in rows]
    batch = InputBatch(
        req_ids=[str(number) for number in range(len(rows))],
        token_ids=[tokens for tokens, _ in rows],
        start_positions=[start for _, start in rows],
        is_prefill=[start == 0 for _, start in rows],
        prompt_lens=lens,
        block_ids=[[] for _ in rows],
        num_logits=[1] * len(rows),
    )
    width = max(lens, default=0)
    padding = [[0] * (width - length) for length in lens]
    token_ids, attention_mask, positions = tensors = batch.to_tensors(CPU)
    assert all(tensor.dtype is torch.int64 and tensor.shape == (len(rows), width) for tensor in tensors)
    assert token_ids.tolist() == [tokens + zeros for (tokens, _), zeros in zip(rows, padding, strict=True)]
    assert attention_mask.tolist() == [[1] * length + zeros for length, zeros in zip(lens, padding, strict=True)]
    assert positions.tolist() == [
        [*range(start, start + len(tokens)), *zeros] for (tokens, start), zeros in zip(rows, padding, strict=True)
    ]
