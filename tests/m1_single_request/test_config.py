"""How an engine is built: configurations that are checked before anything is loaded."""

import gc
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import ConfigError, LLMEngine, ModelConfig, ModelLoadError, TraceConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_config": ModelConfig()}, "cache_config= is unknown"),
        ({"device": "cpu"}, "device= is unknown"),
        ({"model_config": {"device": "cpu"}}, "model_config= must be a ModelConfig"),
        ({"model_config": None}, "model_config= must be a ModelConfig"),
        ({"trace_config": ModelConfig()}, "trace_config= must be a TraceConfig"),
        ({"model": "somewhere", "model_config": ModelConfig()}, "named twice"),
        ({"model": 5}, "model=5"),
        ({"model": ""}, "model=''"),
        ({"parts": ["scheduler"]}, "parts must map"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(**arguments)


@pytest.mark.parametrize(
    "values",
    [
        {"device": "gpu"},
        {"device": "cuda:99"},
        {"device": "meta"},
        {"device": None},
        {"dtype": "float8"},
        {"dtype": None},
        {"max_model_len": 1},
        {"max_model_len": 2.0},
        {"max_model_len": True},
        {"seed": None},
        {"seed": 0.5},
        {"model": ["a"]},
    ],
    ids=str,
)
def test_a_wrong_model_configuration_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ModelConfig(**values)


def test_a_wrong_trace_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="console='loud'"):
        TraceConfig(console="loud")  # type: ignore[arg-type]


def test_configurations_take_keywords_only_and_are_frozen() -> None:
    with pytest.raises(TypeError):
        ModelConfig("somewhere")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ModelConfig().seed = 3  # type: ignore[misc]


def test_a_failed_start_closes_its_trace_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        LLMEngine(
            model_config=ModelConfig(model=tmp_path / "nowhere"), trace_config=TraceConfig(jsonl=tmp_path / "t.jsonl")
        )
    gc.collect()  # a file that was left open warns here, and a warning is an error
