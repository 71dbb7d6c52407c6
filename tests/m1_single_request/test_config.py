"""How an engine is built: configurations that are checked before anything is loaded."""

import gc
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import ConfigError, LLMEngine, ModelConfig, ModelLoadError, TraceConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cpu"}, "device= is unknown"),
        ({"model_config": {"device": "cpu"}}, "model_config= must be a ModelConfig"),
        ({"model_config": None}, "model_config= must be a ModelConfig"),
        ({"model": "somewhere", "model_config": ModelConfig()}, "named twice"),
        ({"model": 5}, "model=5"),
        ({"model": ""}, "model=''"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(**arguments)


def test_a_failed_start_closes_its_trace_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        LLMEngine(
            model_config=ModelConfig(model=tmp_path / "nowhere"), trace_config=TraceConfig(jsonl=tmp_path / "t.jsonl")
        )
    gc.collect()  # a file that was left open warns here, and a warning is an error
