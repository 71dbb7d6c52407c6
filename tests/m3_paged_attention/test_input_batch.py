"""What the runner remembers of a request, until it ends. Every row of every step is read by the test-bed."""

from typing import Any

import pytest

from m1_single_request import SamplingParams
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.input_batch import InputBatch
from m3_paged_attention.row_sampler import SamplingRow
from m3_paged_attention.scheduler_output import NewRequestData, ResumedReqData, SchedulerOutput

BLOCK_SIZE = 4


def new(rid: str, prompt: list[int], blocks: list[int], *, computed: int = 0, **params: Any) -> NewRequestData:
    return NewRequestData(rid, prompt, SamplingParams(**params), 7, frozenset({0}), blocks, computed)


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


# --- one request after the other --------------------------------------------------------------------------------------


def test_the_tokens_of_a_row_may_span_prompt_and_output() -> None:
    known = batch()
    known.update(decision(new("a", [11, 12, 13], [1])))
    state = known.states["a"]
    state.output_token_ids += [21, 22]
    spans = [(0, 3), (0, 5), (2, 4), (3, 5), (4, 5), (1, 2)]
    assert [state.token_ids(*span) for span in spans] == [[11, 12, 13, 21, 22][start:end] for start, end in spans]


# --- several ----------------------------------------------------------------------------------------------------------


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
