"""The settings of m3: KV memory, preemption, kernels. They are checked when a configuration is made.

What is alike in all milestones is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest

from m3_paged_attention import CacheConfig, ConfigError, LLMEngine, ModelConfig, SchedulerConfig
from tests.support.wrong_values import NAN, Wrong, check_refused, each_of

WRONG: Wrong = {
    SchedulerConfig: {"preemption_mode": ("drop", None)},
    CacheConfig: {
        "block_size": (0, 16.0, None),
        "num_blocks": (0, True),
        "kv_cache_memory_bytes": (0, 1e9),
        "swap_space_bytes": (-1,),
        "gpu_memory_utilization": (0, 1.5, NAN, True, "0.9"),
    },
    ModelConfig: {
        "attention_backend": ("flash", None),
        "load_format": ("gguf", 1),
        "device": ("nowhere",),
        "dtype": ("int8",),
        "max_model_len": (1,),
    },
}


@each_of(WRONG)
def test_a_wrong_value_is_refused_with_its_name(make: Any, name: str, value: Any) -> None:
    check_refused(make, name, value)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (SchedulerConfig, {"preemption_mode": "drop"}, "is unknown: use recompute or swap"),
        (CacheConfig, {"gpu_memory_utilization": 0}, "gpu_memory_utilization=0 must be"),
        (ModelConfig, {"attention_backend": "flash"}, "is unknown: use auto or native or torch or triton"),
        (ModelConfig, {"load_format": "gguf"}, "is unknown: use auto or dummy"),
    ],
    ids=str,
)
def test_the_message_names_valid_values(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


def test_each_setting_alone_is_accepted() -> None:
    for values in ({"num_blocks": 1}, {"kv_cache_memory_bytes": 1}, {"gpu_memory_utilization": 1}, {"block_size": 1}):
        assert CacheConfig(**values)
    assert (CacheConfig().block_size, CacheConfig().num_blocks) == (16, None)


def test_what_m2_could_be_told_and_m3_cannot_is_an_error() -> None:
    with pytest.raises(TypeError, match="execution"):
        SchedulerConfig(execution="padded")  # type: ignore[call-arg]


def test_triton_on_a_cpu_without_its_interpreter_is_refused_when_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="attention_backend='triton' cannot run here"):
        LLMEngine(model_config=ModelConfig(device="cpu", attention_backend="triton"))
