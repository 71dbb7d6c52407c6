"""What the runner gets: rows out of a decision, and padded tensors out of rows."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st

from m1_single_request import SamplingParams
from m2_continuous_batching.input_batch import InputBatch, prepare_inputs_from_scheduler_output
from m2_continuous_batching.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

CPU = torch.device("cpu")


def decision(
    new: list[NewRequestData], cached: CachedRequestData | None = None, finished: frozenset[str] = frozenset()
) -> SchedulerOutput:
    cached = cached or CachedRequestData()
    counts = {data.req_id: len(data.prompt_token_ids) for data in new} | dict.fromkeys(cached.req_ids, 1)
    return SchedulerOutput(new, cached, counts, sum(counts.values()), finished)


MIXED = decision(
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
)

# --- messages ---------------------------------------------------------------------------------------------------------


def test_empty_data_names_nobody_and_every_column_is_its_own() -> None:
    empty, other = CachedRequestData(), CachedRequestData()
    assert len(empty.req_ids) == 0
    columns = [getattr(empty, field.name) for field in dataclasses.fields(empty)]
    assert columns == [[]] * 5
    columns += [getattr(other, field.name) for field in dataclasses.fields(other)]
    assert len({id(column) for column in columns}) == 10


@pytest.mark.parametrize("message", [MIXED, MIXED.scheduled_new_reqs[0], MIXED.scheduled_cached_reqs])
def test_messages_are_frozen(message: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.req_ids = []  # type: ignore[attr-defined]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_prefills_come_first_then_decodes() -> None:
    assert prepare_inputs_from_scheduler_output(MIXED) == InputBatch(
        req_ids=["new", "wordy", "old", "older"],
        token_ids=[[11, 12, 13], [21, 22], [31], [41]],
        start_positions=[0, 0, 9, 4],
        is_prefill=[True, True, False, False],
        prompt_lens=[3, 2, 0, 0],
        block_ids=[[2], [0], [], [7]],
        num_logits=[1, 2, 1, 1],
    )


def test_an_empty_decision_has_no_rows() -> None:
    batch = prepare_inputs_from_scheduler_output(decision([]))
    assert (batch.batch_size, batch.num_tokens, batch.req_ids) == (0, 0, [])


def test_rows_can_be_selected_in_any_order() -> None:
    batch = prepare_inputs_from_scheduler_output(MIXED)
    assert (batch.batch_size, batch.num_tokens) == (4, 7)
    assert batch.select(range(4)) == batch
    some = batch.select([3, 0])
    assert (some.req_ids, some.token_ids, some.start_positions) == (["older", "new"], [[41], [11, 12, 13]], [4, 0])
    assert (some.is_prefill, some.prompt_lens, some.block_ids) == ([False, True], [0, 3], [[7], [2]])
    assert (some.num_logits, some.batch_size, some.num_tokens) == ([1, 1], 2, 4)
    assert batch.select([]).batch_size == 0


def test_every_column_of_a_selection_is_as_long() -> None:
    batch = prepare_inputs_from_scheduler_output(MIXED).select([1, 2, 3])
    assert {len(getattr(batch, field.name)) for field in dataclasses.fields(batch)} == {3}


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right() -> None:
    token_ids, attention_mask, positions = prepare_inputs_from_scheduler_output(MIXED).to_tensors(CPU)
    assert token_ids.tolist() == [[11, 12, 13], [21, 22, 0], [31, 0, 0], [41, 0, 0]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert positions.tolist() == [[0, 1, 2], [0, 1, 0], [9, 0, 0], [4, 0, 0]]


def test_a_batch_of_decodes_is_one_column_without_padding() -> None:
    batch = prepare_inputs_from_scheduler_output(MIXED).select([2, 3])
    token_ids, attention_mask, positions = batch.to_tensors(CPU)
    assert (token_ids.tolist(), attention_mask.tolist(), positions.tolist()) == ([[31], [41]], [[1], [1]], [[9], [4]])


def test_an_empty_batch_has_empty_tensors() -> None:
    for tensor in prepare_inputs_from_scheduler_output(decision([])).to_tensors(CPU):
        assert tuple(tensor.shape) == (0, 0)


@given(
    rows=st.lists(st.tuples(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.integers(0, 50)), max_size=6),
)
def test_tensors_hold_the_rows_and_nothing_else(rows: list[tuple[list[int], int]]) -> None:
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
    token_ids, attention_mask, positions = batch.to_tensors(CPU)
    for tensor in (token_ids, attention_mask, positions):
        assert tensor.dtype is torch.int64 and tensor.device == CPU
        assert tuple(tensor.shape) == (len(rows), max(lens, default=0))
    assert attention_mask.sum(-1).tolist() == lens
    for row, (tokens, start) in enumerate(rows):
        assert token_ids[row, : len(tokens)].tolist() == tokens
        assert positions[row, : len(tokens)].tolist() == [start + place for place in range(len(tokens))]
        assert attention_mask[row, : len(tokens)].all()
        assert not token_ids[row, len(tokens) :].any()
        assert not positions[row, len(tokens) :].any() and not attention_mask[row, len(tokens) :].any()
