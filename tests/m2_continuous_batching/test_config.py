"""How large a batch may become: limits that are checked when the configuration is made."""

import dataclasses
from typing import Any

import pytest

from m2_continuous_batching import ConfigError, EngineConfig, ModelConfig, SchedulerConfig, TraceConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": -3}, "max_num_seqs=-3"),
        ({"max_num_seqs": 2.0}, "max_num_seqs=2.0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_num_seqs": None}, "max_num_seqs=None"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_num_batched_tokens": False}, "max_num_batched_tokens=False"),
        ({"max_num_batched_tokens": 512.5}, r"max_num_batched_tokens=512\.5"),
        ({"max_num_batched_tokens": "512"}, "max_num_batched_tokens='512'"),
        ({"execution": "paged"}, "execution='paged' is unknown: use per_request or padded"),
        ({"execution": None}, "execution=None"),
        ({"execution": ["padded"]}, r"execution=\['padded'\]"),
    ],
    ids=str,
)
def test_a_wrong_limit_is_refused_with_its_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**values)


@pytest.mark.parametrize(("seqs", "tokens"), [(2, 1), (16, 15), (64, 8)])
def test_a_budget_without_a_token_for_everybody_who_runs_is_refused(seqs: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}"):
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)


def test_a_token_for_everybody_is_enough() -> None:
    config = SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=7)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (7, 7)
    assert SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1).resolved(100).max_num_batched_tokens == 1


@pytest.mark.parametrize(
    ("seqs", "model_len", "budget"),
    [(16, 512, 2048), (16, 2048, 2048), (16, 40_960, 40_960), (5000, 512, 5000)],
    ids=["a short model", "as long", "a long model", "many sequences"],
)
def test_without_a_budget_no_prompt_and_no_decode_is_refused_for_it(seqs: int, model_len: int, budget: int) -> None:
    config = SchedulerConfig(max_num_seqs=seqs, execution="per_request")
    resolved = config.resolved(model_len)
    assert resolved == SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, execution="per_request")
    assert config.max_num_batched_tokens is None, "the configuration itself stays as it was"


def test_a_budget_that_was_given_stays() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64)
    assert config.resolved(40_960) == config


def test_both_executions_are_accepted_and_padded_is_the_default() -> None:
    assert SchedulerConfig().execution == "padded"
    assert [SchedulerConfig(execution=way).execution for way in ("padded", "per_request")] == ["padded", "per_request"]


def test_it_takes_keywords_only_and_is_frozen() -> None:
    with pytest.raises(TypeError):
        SchedulerConfig(4)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().max_num_seqs = 3  # type: ignore[misc]


def test_an_engine_is_told_of_model_scheduler_and_trace() -> None:
    config = EngineConfig()
    assert (config.model, config.scheduler, config.trace) == (ModelConfig(), SchedulerConfig(), TraceConfig())
    assert [field.name for field in dataclasses.fields(config)] == ["model", "trace", "scheduler"]
