"""Whoever shares the batch, whenever requests come and whatever the limits: everybody gets m1's tokens.

Hypothesis makes the traffic, with the strategies and the comparison of `tests/equivalence/traffic.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import m1_single_request
from m1_single_request.model_loader import LoadedModel
from m2_continuous_batching import SamplingParams
from tests.equivalence import answers
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, WIDE_SETTINGS, Alone, Ask, asks_of, check_ask, serve
from tests.m2_continuous_batching.engines import MakeEngine, check_drained, check_step, limits
from tests.support.amounts import examples
from tests.support.engines import EngineMaker

PROMPT_LENS = (1, 2, 3, 5, 8, 13, 20, 21, 34, 40)
GREEDY = [name for name in CLEAR_SETTINGS if name.startswith("greedy")]
ASKS = asks_of(
    PROMPT_LENS,
    [*GREEDY, *WIDE_SETTINGS],
    n=st.just(1),
    arrival=st.integers(0, 15),
    patience=st.none() | st.integers(0, 8),
)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Alone:
    """`alone(ask, 0)`: m1's answer, as a reference, and how it ended."""
    return Alone(EngineMaker(m1_single_request, loaded))


@pytest.mark.sample(2)
@pytest.mark.hypothesis
@pytest.mark.parametrize("max_num_seqs", [1, 2, 7])
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, execution: str, max_num_seqs: int
) -> None:
    references: list[Reference] = []

    @settings(max_examples=examples(15 if execution == "per_request" else 30 + 10 * max_num_seqs))
    @given(
        asks=st.lists(ASKS, min_size=3, max_size=10),
        equal_len=st.none() | st.sampled_from(PROMPT_LENS),  # then a prompt leaves the others next to nothing
        spare_budget=st.none() | st.integers(0, 3),
    )
    def holds(asks: list[Ask], equal_len: int | None, spare_budget: int | None) -> None:
        asks = [replace(ask, prompt_len=equal_len or ask.prompt_len) for ask in asks]
        longest = max(max_num_seqs, *(ask.prompt_len for ask in asks))
        budget = None if spare_budget is None else longest + spare_budget
        with make_engine(eos_token_ids=EOS, **limits(max_num_seqs, budget, execution)) as engine:
            outputs = serve(engine, asks, check_step)
            check_drained(engine)
        for ask, output in zip(asks, outputs, strict=True):
            references.extend(check_ask(ask, output, alone))

    holds()
    check_cuts(references)


# --- what shares the batch --------------------------------------------------------------------------------------------


def test_a_drawn_answer_does_not_depend_on_who_shares_the_batch(
    make_engine: MakeEngine, make_m1: Any, execution: str
) -> None:
    drawn = SamplingParams(max_tokens=10, temperature=1.0, seed=11, ignore_eos=True)
    answers.check_drawn_in_company(lambda: make_engine(**limits(8, execution=execution)), make_m1(), drawn, longest=30)


def test_without_a_seed_the_number_of_the_request_decides(make_engine: MakeEngine, make_m1: Any) -> None:
    answers.check_unseeded(make_engine(seed=4), make_m1(seed=4))


def test_logprobs_of_prompt_and_output_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, execution: str) -> None:
    engine = make_engine(**limits(4, execution=execution))
    answers.check_logprobs(engine, make_m1(), lengths=(13, 1, 40, 5, 8, 20), top_k=-1, exact_ranks=True)
