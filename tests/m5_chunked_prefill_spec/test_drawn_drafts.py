"""Which model may draft for which, and what its draws do: nothing to the distribution of the answers."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m1_single_request.model_loader import LoadedModel
from m5_chunked_prefill_spec import (
    DEFAULT_MODEL,
    ConfigError,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SpeculativeConfig,
)
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL
from m5_chunked_prefill_spec.speculative import draft_runner
from tests.equivalence.traffic import prompt_of
from tests.m5_chunked_prefill_spec.engines import MakeEngine, setting

# --- which draft model ------------------------------------------------------------------------------------------------

load_draft_model = partial(draft_runner.load_draft_model, default_models=(DEFAULT_MODEL,))


def loading(draft: Any) -> Any:
    """A loader that knows one model, and remembers what it was asked for."""

    def load(config: ModelConfig, kv_cache_dtype: str) -> Any:
        asked.append(config)
        return draft

    asked: list[ModelConfig] = []
    return load, asked


DRAFTING = SpeculativeConfig(method="draft_model")


def test_without_a_draft_model_none_is_loaded(loaded: LoadedModel) -> None:
    load, asked = loading(None)
    for method in (None, "ngram"):
        assert load_draft_model(load, ModelConfig(), "auto", SpeculativeConfig(method=method), loaded) is None
    assert asked == []


def test_the_draft_model_that_ships_is_for_the_default_model(loaded: LoadedModel, loaded_draft: LoadedModel) -> None:
    load, asked = loading(loaded_draft)
    for model in (None, DEFAULT_MODEL):
        assert load_draft_model(load, ModelConfig(model=model, device="cpu"), "auto", DRAFTING, loaded) is loaded_draft
    assert [config.model for config in asked] == [DEFAULT_DRAFT_MODEL] * 2
    assert {(config.device, config.max_model_len) for config in asked} == {("cpu", None)}


def test_the_draft_model_that_ships_does_not_guess_for_another_model(loaded: LoadedModel) -> None:
    load, asked = loading(None)
    with pytest.raises(ConfigError, match=r"name one in SpeculativeConfig\(model=\.\.\.\)"):
        load_draft_model(load, ModelConfig(model="somebody/else"), "auto", DRAFTING, loaded)
    assert asked == []


@pytest.mark.parametrize("what", ["fewer ids", "another tokenizer"])
def test_a_draft_of_another_vocabulary_is_refused(loaded: LoadedModel, loaded_draft: LoadedModel, what: str) -> None:
    if what == "fewer ids":
        config = copy.deepcopy(loaded_draft.config)
        config.vocab_size = 100
        draft = dataclasses.replace(loaded_draft, config=config)
    else:
        vocabulary = {f"<{i}>": i for i in range(loaded.vocab_size)}
        draft = dataclasses.replace(loaded_draft, tokenizer=SimpleNamespace(get_vocab=lambda: vocabulary))  # type: ignore[arg-type]
    load, _ = loading(draft)
    with pytest.raises(ConfigError, match="their vocabularies differ"):
        load_draft_model(load, ModelConfig(), "auto", SpeculativeConfig(method="draft_model", model="small"), loaded)


# --- draws ------------------------------------------------------------------------------------------------------------

DRAWN = {"max_tokens": 4, "temperature": 0.5, "ignore_eos": True}

MANY = 1500


def draws(engine: LLMEngine, seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """What is drawn with each seed for the same prompt."""
    params = [SamplingParams(**DRAWN | {"seed": seed}) for seed in seeds]
    outputs = engine.generate_batch([prompt_of(6)] * len(seeds), params)
    return [output.token_ids for output in outputs.values()]


def test_draws_with_drawn_guesses_are_reproducible(make_engine: MakeEngine) -> None:
    first, second = (make_engine(**setting(16, method="draft_model", drafts=2)) for _ in range(2))
    said = draws(first, range(40))
    assert draws(second, range(40)) == said and len(set(said)) > 10
    assert draws(second, range(40, 80)) != said
    alone = [draws(second, [seed])[0] for seed in range(10)]
    assert alone == said[:10], "with room for everybody's guesses it does not matter who shares the step"


@pytest.mark.exhaustive
def test_drawn_guesses_leave_the_distribution_of_the_answers_as_it_is(make_engine: MakeEngine) -> None:
    """The second and third token of many answers with guesses and without, by a chi-square test of two samples."""
    limits: dict[str, Any] = {"tokens": 4096, "max_num_batched_tokens": 512, "debug": False, "policy": "fcfs"}
    guessing = make_engine(**setting(64, method="draft_model", drafts=2, **limits))
    plain = make_engine(**setting(64, **limits))
    samples = [draws(guessing, range(MANY)), draws(plain, range(MANY, 2 * MANY))]
    assert 0.2 < guessing.stats().acceptance_rate < 0.9 and not plain.stats().num_draft_tokens
    for which in (slice(1, 2), slice(2, 3), slice(1, 3)):
        first, second = (Counter(said[which] for said in sample) for sample in samples)
        common = [run for run in first | second if first[run] + second[run] >= 20]
        cells = [(first[run], second[run]) for run in common]
        cells.append((MANY - sum(a for a, _ in cells), MANY - sum(b for _, b in cells)))
        statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
        freedom = len(common)
        assert freedom > 8 and statistic < freedom + 3 * (2 * freedom) ** 0.5


@pytest.mark.gpu
def test_a_draft_model_draws_on_a_gpu(tiny_directory: Path, draft_directory: Path) -> None:
    config = ModelConfig(model=tiny_directory, device="cuda", dtype="float32")
    limits = setting(16, method="draft_model", drafts=2, draft_model=draft_directory)
    engine = LLMEngine(model_config=config, **limits)
    said = draws(engine, range(20))
    assert len(set(said)) > 5 and engine.stats().num_accepted_tokens > 0
    engine.close()
