"""Whoever shares the batch, whenever requests come and whatever the limits: everybody gets m1's tokens.

Hypothesis makes the traffic. m1 answers each request alone; the comparison is the one of `tests/equivalence`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import m1_single_request
from m1_single_request.model_loader import LoadedModel
from m2_continuous_batching import LLMEngine, SamplingParams
from tests.equivalence.harness import Reference, check_answer, check_cuts
from tests.m2_continuous_batching.engines import MakeEngine, check_drained, check_step, limits
from tests.support.engines import EngineMaker

EOS = range(0, 4096, 40)  # so many that answers of a random model end anywhere
MOST_TOKENS = 12
PROMPT_LENS = (1, 2, 3, 5, 8, 13, 20, 21, 34, 40)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, on past eos": {"ignore_eos": True},
    "greedy with a stop string": {"stop": "e"},
    "drawn": {"temperature": 1.0, "seed": 5},
    "drawn with everything": {
        "temperature": 0.8,
        "seed": 6,
        "top_k": 60,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_tokens": 4,
    },
}


def prompt_of(length: int, which: int = 0) -> list[int]:
    """One of the prompts of this length."""
    rng = Random(f"{length}/{which}")
    return [rng.randrange(4096) for _ in range(length)]


@dataclass(frozen=True)
class Ask:
    """A request, the step before which it comes, and how many steps later it is given up, if it is."""

    prompt_len: int
    which: int
    setting: str
    max_tokens: int
    arrival: int
    patience: int | None

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.prompt_len, self.which)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, **with_least(SETTINGS[self.setting], self.max_tokens))


def with_least(setting: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The setting with its `min_tokens` within `max_tokens`."""
    return setting | {"min_tokens": min(setting.get("min_tokens", 0), max_tokens)}


ASKS = st.builds(
    Ask,
    prompt_len=st.sampled_from(PROMPT_LENS),
    which=st.integers(0, 1),
    setting=st.sampled_from(sorted(SETTINGS)),
    max_tokens=st.integers(1, MOST_TOKENS),
    arrival=st.integers(0, 15),
    patience=st.none() | st.integers(0, 8),
)

Alone = Callable[[Ask], tuple[Reference, str]]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Alone:
    """`alone(ask)`: m1's answer, as a reference, and how it ended."""
    engine = EngineMaker(m1_single_request, loaded)(eos_token_ids=EOS)
    answers: dict[Any, tuple[Reference, str]] = {}

    def answer(ask: Ask) -> tuple[Reference, str]:
        key = ask.prompt_len, ask.which, ask.setting
        if key not in answers:
            params = SamplingParams(max_tokens=MOST_TOKENS, logprobs=2, **SETTINGS[ask.setting])
            output = engine.generate(ask.prompt, params)
            best = [sorted(entry.logprob for entry in row.values())[-2:] for row in output.outputs[0].logprobs]
            gaps = tuple(last - first if params.is_greedy else 1.0 for first, last in best)
            answers[key] = Reference(tuple(ask.prompt), output.token_ids, gaps), output.finish_reason
        whole, reason = answers[key]
        shorter = Reference(whole.prompt_token_ids, whole.token_ids[: ask.max_tokens], whole.gaps[: ask.max_tokens])
        return shorter, reason if len(whole.token_ids) <= ask.max_tokens else "length"

    return answer


def serve(engine: LLMEngine, asks: list[Ask]) -> list[Any]:
    """Let the requests come and go; the last output of each."""
    last: dict[str, Any] = {}
    number = 0
    while number <= max(ask.arrival for ask in asks) or engine.has_unfinished_requests():
        assert number < 500, "the engine does not come to an end"
        for index, ask in enumerate(asks):
            if ask.arrival == number:
                engine.add_request(ask.prompt, ask.params, request_id=f"r{index}")
            if ask.patience is not None and ask.arrival + ask.patience == number:
                engine.abort_request(f"r{index}")
        outputs = engine.step()
        check_step(engine)
        assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported again after its end"
        last |= outputs
        number += 1
    check_drained(engine)
    return [last[f"r{index}"] for index in range(len(asks))]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7])
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, execution: str, max_num_seqs: int
) -> None:
    references: list[Reference] = []

    @settings(max_examples=15 if execution == "per_request" else 30 + 10 * max_num_seqs)
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
            outputs = serve(engine, asks)
        for ask, output in zip(asks, outputs, strict=True):
            reference, reason = alone(ask)
            if output.finish_reason == "abort":
                assert ask.patience is not None
                size = len(output.token_ids)
                reference = Reference(reference.prompt_token_ids, reference.token_ids[:size], reference.gaps[:size])
            elif reference.cut is None:
                assert output.finish_reason == reason
            check_answer(reference, output.token_ids, f"{ask}")
            references.append(reference)

    holds()
    check_cuts(references)


# --- what shares the batch --------------------------------------------------------------------------------------------

DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=11, ignore_eos=True)


def test_a_drawn_answer_does_not_depend_on_who_shares_the_batch(
    make_engine: MakeEngine, make_m1: Any, execution: str
) -> None:
    expected = make_m1().generate(prompt_of(8), DRAWN).token_ids
    others = [SamplingParams(max_tokens=n + 3, temperature=0.5 + n / 4, seed=n, ignore_eos=True) for n in range(5)]
    for place in (0, 2, 5):
        engine = make_engine(**limits(8, execution=execution))
        params = [*others[:place], DRAWN, *others[place:]]
        prompts = [prompt_of(3 * n + 1) for n in range(place)] + [prompt_of(8)] + [prompt_of(30)] * (5 - place)
        outputs = list(engine.generate_batch(prompts, params).values())
        assert outputs[place].token_ids == expected


def test_without_a_seed_the_number_of_the_request_decides(make_engine: MakeEngine, make_m1: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0)
    prompts = [prompt_of(n) for n in (5, 8, 3, 13)]
    outputs = make_engine(seed=4).generate_batch(prompts, params)
    assert [o.token_ids for o in outputs.values()] == [
        o.token_ids for o in make_m1(seed=4).generate_batch(prompts, params).values()
    ]


def test_logprobs_of_prompt_and_output_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, execution: str) -> None:
    prompts = [prompt_of(n) for n in (13, 1, 40, 5, 8, 20)]
    asked = [
        SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=7, prompt_logprobs=0),
        SamplingParams(max_tokens=3, logprobs=0),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=4, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=4, repetition_penalty=1.5),
        SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1),
    ]
    outputs = make_engine(**limits(4, execution=execution)).generate_batch(prompts, asked)
    expected = make_m1().generate_batch(prompts, asked)
    for output, wanted in zip(outputs.values(), expected.values(), strict=True):
        assert output.token_ids == wanted.token_ids
        assert_same_logprobs(output.prompt_logprobs, wanted.prompt_logprobs)
        assert_same_logprobs(output.outputs[0].logprobs, wanted.outputs[0].logprobs)


def assert_same_logprobs(rows: Any, wanted: Any) -> None:
    if wanted is None:
        assert rows is None
        return
    assert len(rows) == len(wanted)
    for row, other in zip(rows, wanted, strict=True):
        if other is None:
            assert row is None
            continue
        assert row.keys() == other.keys()
        for token_id, entry in other.items():
            assert row[token_id].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert (row[token_id].rank, row[token_id].decoded_token) == (entry.rank, entry.decoded_token)
