"""Several drawn outputs of one prompt are the answers that m1 gives to single requests with the children's seeds.

A draw inverts the cumulative distribution at a random number. Where that number lies within 1e-5 of a boundary between
two tokens, two correct programs may draw differently: such a near tie cuts the comparison, and counts, like one of two
logits. A random model is unsure among thousands of tokens, and so has thousands of boundaries: `top_k` leaves a few.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import m1_single_request
from m1_single_request import SamplingParams
from m1_single_request.sampler import Sampler, apply_penalties, filtered_probs
from m1_single_request.sampling_metadata import SamplingMetadata
from tests.equivalence.harness import NEAR_TIE, VARIANTS, Prompt, Reference, ReferenceModel, Variant, compare
from tests.equivalence.models import MODELS

NEAR_BOUNDARY = 1e-5
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
PARALLEL = [variant for variant in VARIANTS if variant.milestone >= "m3"]
CASES = [(variant, model) for variant in PARALLEL for model in MODELS]


class MeasuringSampler(Sampler):
    """Notes how far each draw was from another token, as a share of the whole distribution."""

    def __init__(self) -> None:
        self.margins: list[float] = []

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        chosen = super().choose(logits, metadata)
        assert metadata.uniforms is not None and len(chosen) == 1
        biased = logits if metadata.bias is None else logits + metadata.bias
        if metadata.penalties is not None:
            biased = apply_penalties(biased, metadata)
        cumulative = filtered_probs(biased / metadata.temperature[:, None], metadata).cumsum(dim=-1)
        boundaries = cumulative / cumulative[:, -1:]
        self.margins.append(float((boundaries - metadata.uniforms[:, None]).abs().min()))
        return chosen


References = Callable[[str, str], tuple[list[Prompt], list[Reference]]]


@pytest.fixture(scope="module")
def singles(
    references: Callable[[str], tuple[list[Prompt], list[Reference]]],
    reference_model: Callable[[str], ReferenceModel],
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
                    gaps = tuple(margin / NEAR_BOUNDARY * NEAR_TIE for margin in sampler.margins)
                    found.append(Reference(output.prompt_token_ids, output.token_ids, gaps))
        return prompts, found

    yield answer


@pytest.mark.parametrize(("variant", "model"), CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_drawn_outputs_are_single_answers_with_the_next_seeds(
    variant: Variant, model: str, singles: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
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
        if variant.parts():
            assert engine.stats().num_preemptions > 0, "somebody lost his place"


