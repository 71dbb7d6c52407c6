"""What the runner remembers: built from full descriptions, kept up by differences, forgotten when a request ends."""

from typing import Any

import pytest

from m1_single_request import SamplingParams
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.input_batch import BatchRow, InputBatch
from m3_paged_attention.row_sampler import SamplingRow
from m3_paged_attention.scheduler_output import NewRequestData, ResumedReqData, SchedulerOutput

BLOCK_SIZE = 4


def new(rid: str, prompt: list[int], blocks: list[int], *, computed: int = 0, **params: Any) -> NewRequestData:
    return NewRequestData(rid, prompt, SamplingParams(**params), 7, frozenset({0}), blocks, computed)


def cached(**rows: tuple[int, list[int], int]) -> CachedRequestData:
    """By request id: its newest token, its new blocks, its start position."""
    columns = [list(column) for column in zip(*rows.values(), strict=True)] or [[], [], []]
    tokens, blocks, starts = columns
    return CachedRequestData(list(rows), [[token] for token in tokens], blocks, starts, [1] * len(rows))


def decision(
    *full: NewRequestData | ResumedReqData,
    counts: dict[str, int] | None = None,
    others: CachedRequestData | None = None,
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    fresh = [data for data in full if isinstance(data, NewRequestData)]
    resumed = [data for data in full if isinstance(data, ResumedReqData)]
    others = others or CachedRequestData()
    own = {data.req_id: len(data.prompt_token_ids) - data.num_computed_tokens for data in fresh}
    own |= dict.fromkeys(others.req_ids, 1) | (counts or {})
    return SchedulerOutput(fresh, resumed, others, own, sum(own.values()), frozenset(finished), [], [], [])


def batch(max_num_seqs: int = 2) -> InputBatch:
    return InputBatch(max_num_seqs=max_num_seqs, max_blocks_per_seq=4, block_size=BLOCK_SIZE)


def table(batch: InputBatch, rid: str) -> list[int]:
    return [int(block) for block in batch.block_tables[batch.states[rid].table_row]]


def facts(row: BatchRow) -> tuple[Any, ...]:
    return row.state.req_id, row.start, row.num_tokens, row.is_prompt


# --- one request after the other --------------------------------------------------------------------------------------


def test_a_new_request_is_remembered_in_full() -> None:
    known = batch()
    (row,) = known.update(decision(new("a", [11, 12, 13, 14, 15], [3, 5], temperature=0.5)))
    assert facts(row) == ("a", 0, 5, True)
    assert table(known, "a") == [3, 5, 0, 0], "unused entries point at block 0"
    assert (row.state.params.temperature, row.state.sampling_row.seed) == (0.5, 7)
    assert row.state.sampling_row.stop_ids == {0}


def test_a_fork_begins_behind_the_tokens_that_its_sibling_computed() -> None:
    (row,) = batch().update(decision(new("a/1", [11, 12, 13, 14, 15], [3, 5], computed=4)))
    assert facts(row) == ("a/1", 4, 1, False), "its prompt does not go through the model"


def test_the_tokens_of_a_row_may_span_prompt_and_output() -> None:
    known = batch()
    known.update(decision(new("a", [11, 12, 13], [1])))
    state = known.states["a"]
    state.output_token_ids += [21, 22]
    spans = [(0, 3), (0, 5), (2, 4), (3, 5), (4, 5), (1, 2)]
    assert [state.token_ids(*span) for span in spans] == [[11, 12, 13, 21, 22][start:end] for start, end in spans]


# --- several ----------------------------------------------------------------------------------------------------------


def test_rows_with_several_tokens_come_first() -> None:
    known = batch(4)
    known.update(decision(new("old", [1], [1]), new("gone", [2], [2])))
    rows = known.update(
        decision(
            new("one", [3], [3]),
            new("long", [4, 5], [4]),
            ResumedReqData("gone", [9], [5], 0),
            counts={"gone": 2},
            others=cached(old=(8, [], 1)),
        )
    )
    assert [row.state.req_id for row in rows] == ["long", "gone", "one", "old"]


def test_an_end_makes_room_and_comes_before_a_new_request_of_the_same_id() -> None:
    known = batch(1)
    known.update(decision(new("a", [1, 2, 3, 4, 5], [1, 2])))
    known.update(decision(new("a", [9], [3]), finished=("a", "unknown")))
    assert table(known, "a") == [3, 0, 0, 0] and known.states["a"].prompt_token_ids == [9]
    assert len(known.block_tables) == 1
    assert known.update(decision(finished=("a",))) == [] and not known.states
    known.remove("a")  # no error
    known.update(decision(new("b", [1], [6])))
    assert table(known, "b") == [6, 0, 0, 0], "of the one before nothing is left"
    assert len(known.block_tables) == 1


def test_a_request_sent_as_new_again_replaces_itself() -> None:
    known = batch(1)
    for blocks in ([1, 2], [4]):
        known.update(decision(new("a", [1, 2, 3], blocks)))
    assert table(known, "a") == [4, 0, 0, 0] and len(known.block_tables) == 1


def test_preempted_requests_keep_their_rows_and_others_get_more() -> None:
    known = batch(2)
    ids = [f"r{number}" for number in range(5)]
    for number, rid in enumerate(ids):
        known.update(decision(new(rid, [1], [number + 1])))
    assert [table(known, rid)[0] for rid in ids] == [1, 2, 3, 4, 5]
    assert len({known.states[rid].table_row for rid in ids}) == 5


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"max_tokens": 3, "stop_token_ids": [5]}, True),
        ({"temperature": 0.7}, False),
        ({"logprobs": 0}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
    ],
    ids=str,
)
def test_a_plain_row_needs_the_best_token_and_nothing_else(params: dict[str, Any], plain: bool) -> None:
    assert SamplingRow(SamplingParams(**{"temperature": 0.0} | params), 0, [1], []).is_plain is plain
