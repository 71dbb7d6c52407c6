"""Whoever shares the steps and the memory, whenever requests come and go: everybody gets m1's tokens.

Hypothesis makes the traffic, with several outputs per prompt, in pools so small that requests are thrown out by
recompute and by swap. m1 answers each request alone; the comparison is the one of `tests/equivalence`, and a draw
within 1e-5 of another token is a near tie like two logits within 1e-4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import m1_single_request
from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention import KVCapacityError, LLMEngine, SamplingParams, row_sampler
from tests.equivalence.draws import MeasuringSampler, gaps_of
from tests.equivalence.forced_preemption import ForcedPreemption
from tests.equivalence.harness import Reference, check_answer, check_cuts
from tests.m3_paged_attention.engines import InTurn, MakeEngine, check_drained, check_step, setting
from tests.support.engines import EngineMaker

EOS = range(0, 4096, 40)  # so many that answers of a random model end anywhere
MOST_TOKENS = 12
PROMPT_LENS = (1, 2, 3, 5, 8, 13, 16, 17, 21)
SEED = 70
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, on past eos": {"ignore_eos": True},
    "greedy with a stop string": {"stop": "e"},
    "greedy with penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "greedy with a bias": {"logit_bias": {7: 4.0, 11: -100.0}, "min_tokens": 3},
    "drawn": {"temperature": 1.0, "seed": SEED, "top_k": 5},
    "drawn with everything": {
        "temperature": 0.8,
        "seed": SEED,
        "top_k": 4,
        "top_p": 0.97,
        "min_p": 0.01,
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
    n: int
    max_tokens: int
    arrival: int
    patience: int | None

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.prompt_len, self.which)

    @property
    def params(self) -> SamplingParams:
        values = SETTINGS[self.setting]
        least = {"min_tokens": min(values.get("min_tokens", 0), self.max_tokens)}
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, **values | least)


ASKS = st.builds(
    Ask,
    prompt_len=st.sampled_from(PROMPT_LENS),
    which=st.integers(0, 1),
    setting=st.sampled_from(sorted(SETTINGS)),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.integers(1, MOST_TOKENS),
    arrival=st.integers(0, 12),
    patience=st.none() | st.none() | st.integers(0, 9),
)

Alone = Callable[[Ask, int], tuple[Reference, str]]


@pytest.fixture(scope="module")
def alone(loaded_m1: Any) -> Alone:
    """`alone(ask, child)`: m1's answer to one child, as a reference, and how it ended."""
    sampler = MeasuringSampler()
    engine = EngineMaker(m1_single_request, loaded_m1)({"sampler": lambda: sampler}, eos_token_ids=EOS)
    answers: dict[Any, tuple[Reference, str]] = {}

    def answer(ask: Ask, child: int) -> tuple[Reference, str]:
        values = SETTINGS[ask.setting]
        child = child if "seed" in values else 0
        key = ask.prompt_len, ask.which, ask.setting, child
        if key not in answers:
            sampler.margins.clear()
            own = values | {"seed": SEED + child}
            output = engine.generate(ask.prompt, SamplingParams(max_tokens=MOST_TOKENS, **own))
            gaps = gaps_of(sampler.margins)
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
        assert number < 800, "the engine does not come to an end"
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


def check_ask(ask: Ask, output: Any, alone: Alone, num_slots: int) -> list[Reference]:
    """Hold all outputs of a request to m1's; returns what they were held to."""
    references = []
    assert len(output.outputs) == ask.n and output.finished
    for child, completion in enumerate(output.outputs):
        reference, reason = alone(ask, child)
        if completion.finish_reason == "abort":
            assert ask.patience is not None
            reference = cut_to(reference, len(completion.token_ids))
        elif completion.finish_reason == "error":
            assert isinstance(output.error, KVCapacityError)
            assert ask.prompt_len + len(completion.token_ids) > num_slots
            reference = cut_to(reference, len(completion.token_ids))
        elif reference.cut is None:
            assert completion.finish_reason == reason
        check_answer(reference, completion.token_ids, f"{ask}, child {child}")
        references.append(reference)
    return references


def cut_to(reference: Reference, size: int) -> Reference:
    return Reference(reference.prompt_token_ids, reference.token_ids[:size], reference.gaps[:size])


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_any_traffic_gets_the_tokens_of_m1(make_engine: MakeEngine, alone: Alone, mode: str, block_size: int) -> None:
    references: list[Reference] = []
    num_preemptions = [0]

    @settings(max_examples=20)
    @given(
        asks=st.lists(ASKS, min_size=3, max_size=8),
        max_num_seqs=st.sampled_from([1, 2, 4, 8]),
        spare_blocks=st.integers(0, 6),
        spare_budget=st.none() | st.integers(0, 3),
        parts=st.sampled_from([{}, {"preemption": InTurn}, {"scheduler": ForcedPreemption}]),
    )
    def holds(
        asks: list[Ask], max_num_seqs: int, spare_blocks: int, spare_budget: int | None, parts: dict[str, Any]
    ) -> None:
        longest = max(ask.prompt_len for ask in asks)
        budget = None if spare_budget is None else max(max_num_seqs, longest) + spare_budget
        blocks = -(-longest // block_size) + spare_blocks
        limits = setting(max_num_seqs, budget, blocks=blocks, block_size=block_size, mode=mode)
        with make_engine(parts, eos_token_ids=EOS, **limits) as engine:
            outputs = serve(engine, asks)
            num_preemptions[0] += engine.stats().num_preemptions
        for ask, output in zip(asks, outputs, strict=True):
            references.extend(check_ask(ask, output, alone, blocks * block_size))

    holds()
    check_cuts(references)
    assert num_preemptions[0] > 10


# --- numbers ----------------------------------------------------------------------------------------------------------


def noting(rows: list[Tensor]) -> type[Sampler]:
    """A sampler that keeps the logits that it sees."""

    class Noting(Sampler):
        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> Any:
            rows.extend(logits.clone())
            return super().__call__(logits, metadata)

    return Noting


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
def test_logits_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, mode: str, block_size: int) -> None:
    """Every row of logits of every request, with somebody thrown out in every third step."""
    prompts = [prompt_of(n) for n in (1, 21, 5, 16)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    theirs: list[Tensor] = []
    expected = make_m1({"sampler": noting(theirs)}).generate_batch(prompts, params)
    wanted = {
        (tuple(prompt), place): theirs[number * 9 + place]
        for number, prompt in enumerate(prompts)
        for place in range(9)
    }
    ours: list[Tensor] = []
    engine = make_engine(
        {"sampler": noting(ours), "scheduler": ForcedPreemption}, **setting(4, block_size=block_size, mode=mode)
    )
    places: list[tuple[tuple[int, ...], int]] = []
    runner = engine.engine_core.executor.worker.model_runner
    sampler = runner.sampler

    def noted(req_ids: Any, rows: Any, logits: Tensor) -> Any:
        places.extend((tuple(row.prompt_token_ids), len(row.output_token_ids)) for row in rows)
        return sampler(req_ids, rows, logits)

    runner.sampler = noted
    outputs = engine.generate_batch(prompts, params)
    assert engine.stats().num_preemptions >= 3
    assert [o.token_ids for o in outputs.values()] == [o.token_ids for o in expected.values()]
    assert sorted(places) == sorted(wanted), "each row once: nobody's token is sampled again after a preemption"
    for place, row in zip(places, ours, strict=True):
        torch.testing.assert_close(row, wanted[place], rtol=0, atol=1e-4)


def test_logprobs_of_prompt_and_output_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    prompts = [prompt_of(n) for n in (13, 1, 21, 5, 8, 17)]
    asked = [
        SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=7, prompt_logprobs=0),
        SamplingParams(max_tokens=3, logprobs=0),
        SamplingParams(max_tokens=9),
        SamplingParams(
            max_tokens=4, temperature=1.0, seed=3, top_k=5, logprobs=1, prompt_logprobs=4, repetition_penalty=1.5
        ),
        SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1),
    ]
    engine = make_engine({"scheduler": ForcedPreemption}, **setting(4, block_size=4, mode=mode))
    outputs = engine.generate_batch(prompts, asked)
    assert engine.stats().num_preemptions > 0
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
            assert row[token_id].decoded_token == entry.decoded_token
            # Far down the list many tokens are equally likely up to rounding.
            assert abs(row[token_id].rank - entry.rank) <= entry.rank // 100


def test_prompt_logprobs_of_a_long_prompt_come_in_pieces(make_engine: MakeEngine, make_m1: Any) -> None:
    """More rows than are computed at a time."""
    prompt, params = prompt_of(21) * 12, SamplingParams(max_tokens=2, prompt_logprobs=1)
    seen: list[int] = []
    engine = make_engine(**setting(2, block_size=16))
    model = engine.engine_core.executor.worker.model_runner.model
    compute = model.compute_logits
    at_a_time, row_sampler.ROWS_AT_A_TIME = row_sampler.ROWS_AT_A_TIME, 100
    model.compute_logits = lambda hidden: (seen.append(len(hidden)), compute(hidden))[1]
    try:
        output = engine.generate(prompt, params)
    finally:
        del model.compute_logits
        row_sampler.ROWS_AT_A_TIME = at_a_time
    assert seen == [1, 100, 100, 51, 1]
    assert_same_logprobs(output.prompt_logprobs, make_m1().generate(prompt, params).prompt_logprobs)


# --- what shares the batch --------------------------------------------------------------------------------------------

DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=11, top_k=8, ignore_eos=True)


def test_a_drawn_answer_does_not_depend_on_who_shares_steps_and_memory(
    make_engine: MakeEngine, make_m1: Any, mode: str
) -> None:
    expected = make_m1().generate(prompt_of(8), DRAWN).token_ids
    others = [SamplingParams(max_tokens=n + 3, temperature=0.5 + n / 4, seed=n, ignore_eos=True) for n in range(5)]
    for place in (0, 2, 5):
        engine = make_engine(**setting(8, blocks=20, block_size=4, mode=mode))
        params = [*others[:place], DRAWN, *others[place:]]
        prompts = [prompt_of(3 * n + 1) for n in range(place)] + [prompt_of(8)] + [prompt_of(17)] * (5 - place)
        outputs = list(engine.generate_batch(prompts, params).values())
        assert outputs[place].token_ids == expected


def test_without_a_seed_the_number_of_the_request_decides(make_engine: MakeEngine, make_m1: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0)
    prompts = [prompt_of(n) for n in (5, 8, 3, 13)]
    outputs = make_engine(seed=4).generate_batch(prompts, params)
    assert [o.token_ids for o in outputs.values()] == [
        o.token_ids for o in make_m1(seed=4).generate_batch(prompts, params).values()
    ]
