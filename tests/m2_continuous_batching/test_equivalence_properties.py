"""Whatever shares the batch, whenever requests come and whatever the limits: each request gets m1's tokens.

Hypothesis makes the traffic, with the strategies and the comparison of `tests/equivalence/traffic.py`.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, SETTINGS, Alone, Ask, asks_of, check_ask, serve
from tests.m2_continuous_batching.engines import MakeEngine, check_drained, check_step, limits
from tests.support.amounts import examples

PROMPT_LENS = (1, 2, 3, 5, 8, 13, 20, 21, 34, 40)
ASKS = asks_of(PROMPT_LENS, SETTINGS, n=st.just(1), arrival=st.integers(0, 15), patience=st.none() | st.integers(0, 8))


@pytest.mark.sample(2)
@pytest.mark.hypothesis
@pytest.mark.parametrize("max_num_seqs", [1, 2, 7])
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, execution: str, max_num_seqs: int
) -> None:
    clear: list[Reference] = []
    others: list[Reference] = []

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
            (clear if ask.setting in CLEAR_SETTINGS else others).extend(check_ask(ask, output, alone))

    holds()
    check_cuts(clear)
    num_compared = sum(len(reference.token_ids[: reference.cut]) for reference in others)
    assert num_compared > 20 or execution == "per_request", "too few draws from all tokens"  # of which few are made
