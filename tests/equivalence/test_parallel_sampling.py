"""Several drawn outputs of one prompt are the answers that m1 gives to single requests with the children's seeds."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

import m1_single_request
from m1_single_request import SamplingParams
from tests.equivalence.draws import MeasuringSampler, gaps_of
from tests.equivalence.harness import VARIANTS, Prompt, Reference, ReferenceModel, Variant, compare
from tests.equivalence.models import MODELS

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8, "seed": 300, "top_k": 6},
    "penalised": {
        "temperature": 0.6,
        "top_k": 4,
        "seed": 500,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.1,
        "min_tokens": 5,
        "logit_bias": {5: 3.0, 9: -100.0},
    },
}
N = 4
MAX_TOKENS = 10
PARALLEL = [variant for variant in VARIANTS if variant.milestone >= "m3" and variant.draws_alike]
CASES = [(variant, model) for model in MODELS for variant in PARALLEL if model in (variant.models or MODELS)]


References = Callable[[str, str], tuple[list[Prompt], list[Reference]]]


@pytest.fixture(scope="module")
def singles(
    references: Callable[[str], tuple[list[Prompt], list[Reference]]], reference_model: Callable[[str], ReferenceModel]
) -> Iterator[References]:
    """`singles(model, setting)`: four prompts, and m1's answers to each with four seeds."""

    @cache
    def answer(name: str, setting: str) -> tuple[list[Prompt], list[Reference]]:
        sampler = MeasuringSampler()
        model_config = m1_single_request.ModelConfig(
            model=reference_model(name).directory, device="cpu", dtype="float32"
        )
        prompts, found = references(name)[0][2::5], []
        with m1_single_request.LLMEngine(model_config=model_config, parts={"sampler": lambda: sampler}) as engine:
            for prompt in prompts:
                for child in range(N):
                    sampler.margins.clear()
                    values = SETTINGS[setting] | {"seed": SETTINGS[setting]["seed"] + child}
                    output = engine.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, **values))
                    gaps = gaps_of(sampler.margins)
                    found.append(Reference(output.prompt_token_ids, output.token_ids, gaps))
        return prompts, found

    yield answer


def every_kind(variant: Variant, model: str) -> set[Any]:
    """Each milestone, all kernels, with preemption and without, on one model."""
    return {variant.milestone, variant.backend, variant.preempts} if model == "qwen3" else set()


@pytest.mark.sample(of=every_kind)
@pytest.mark.parametrize(("variant", "model"), CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_drawn_outputs_are_single_answers_with_the_next_seeds(
    variant: Variant, model: str, singles: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
    if obstacle := variant.obstacle():
        pytest.skip(obstacle)
    with variant.make_engine(reference_model(model).directory) as engine:
        for setting, values in SETTINGS.items():
            prompts, expected = singles(model, setting)
            params = SamplingParams(max_tokens=MAX_TOKENS, n=N, **values)
            outputs = list(engine.generate_batch(prompts, params).values())
            assert [output.error for output in outputs] == [None] * len(prompts)
            completions = [completion for output in outputs for completion in output.outputs]
            assert [completion.index for completion in completions] == list(range(N)) * len(prompts)
            compare(expected, [completion.token_ids for completion in completions])
        assert engine.stats().kv_tokens == 0
        assert not variant.preempts or variant.num_preemptions(engine) > 0
