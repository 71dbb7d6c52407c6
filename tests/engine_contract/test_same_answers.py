"""Draws and log-probabilities in a batch are those of m1, which computes each request alone.

That greedy answers are the same is tested in `tests/equivalence`, on more models and in every way to ask.
"""

from typing import Any

import pytest

from m1_single_request import SamplingParams
from tests.engine_contract.crowd import MakeEngine
from tests.engine_contract.variants import Variant
from tests.equivalence import answers

pytestmark = pytest.mark.sample(3)


@pytest.mark.parametrize("room", [None, 80], ids=["all memory", "little memory"])
def test_a_drawn_answer_does_not_depend_on_what_shares_steps_and_memory(
    make_engine: MakeEngine, make_m1: Any, room: int | None
) -> None:
    drawn = SamplingParams(max_tokens=10, temperature=1.0, seed=11, top_k=8, ignore_eos=True)
    answers.check_drawn_in_company(lambda: make_engine(seats=8, room=room), make_m1(), drawn, longest=30)


def test_without_a_seed_the_number_of_the_request_decides(make_engine: MakeEngine, make_m1: Any) -> None:
    answers.check_unseeded(make_engine(seed=4), make_m1(seed=4))


def test_logprobs_of_prompt_and_output_are_those_of_m1(variant: Variant, make_engine: MakeEngine, make_m1: Any) -> None:
    exact = variant.milestone < "m3"  # the same model, transformers'
    answers.check_logprobs(make_engine(), make_m1(), lengths=(13, 1, 40, 5, 8, 20), top_k=5, exact_ranks=exact)
