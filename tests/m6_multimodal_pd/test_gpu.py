"""The engine that sees, on a CUDA device: transformers' tokens, alone and in a group, and weights that are replaced."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from tests.equivalence.harness import check_answer, check_cuts
from tests.m6_multimodal_pd.engines import counts, setting
from tests.m6_multimodal_pd.seeing import MOST_TOKENS, Theirs, asking
from tests.m6_multimodal_pd.test_engine import QUESTIONS

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
BACKENDS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: no TF32 in the products that are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(directory: Path, backend: Any, **configs: Any) -> LLMEngine:
    config = ModelConfig(model=directory, device="cuda", dtype="float32", attention_backend=backend)
    return LLMEngine(model_config=config, **{**setting(tokens=2048, debug=False), **configs})


def check_answers(engine: Any, theirs: Theirs, questions: Sequence[tuple[str | int, ...]]) -> None:
    prompts = [engine.chat_prompt(asking(*question)) for question in questions]
    references = [theirs.answer(prompt) for prompt in prompts]
    outputs = list(engine.generate_batch(prompts, PARAMS).values())
    for reference, output, question in zip(references, outputs, questions, strict=True):
        assert output.error is None
        check_answer(reference, output.token_ids, str(question))
    check_cuts(references)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pictures_clips_and_texts_are_answered_as_by_transformers(
    seeing_directory: Path, their_model: Theirs, backend: str
) -> None:
    with on_gpu(seeing_directory, backend) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
        runs, items, _ = counts(engine)
        assert 0 < runs < items
        check_answers(engine, their_model, list(QUESTIONS.values()))
        assert engine.stats().kv_tokens == 0


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_two_engines_on_one_device_answer_as_one(seeing_directory: Path, their_model: Theirs, transport: Any) -> None:
    group = DisaggregationConfig(transport=transport)
    with on_gpu(seeing_directory, "auto", disaggregation_config=group) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))


def test_an_engine_sizes_its_memory_and_loads_other_weights(seeing_directory: Path, their_model: Theirs) -> None:
    cache = CacheConfig(gpu_memory_utilization=0.2)
    with on_gpu(seeing_directory, "auto", cache_config=cache) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values())[:3])
        engine.update_weights(seeing_directory)
        check_answers(engine, their_model, list(QUESTIONS.values())[:3])


def test_guesses_of_a_draft_model_are_checked_on_the_device(seeing_directory: Path, their_model: Theirs) -> None:
    limits = setting(64, method="ngram", tokens=2048, debug=False)
    with on_gpu(seeing_directory, "auto", **limits) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
