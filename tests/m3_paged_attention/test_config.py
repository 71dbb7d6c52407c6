"""The settings of m3: KV memory, preemption, kernels. They are checked when a configuration is made.

What a configuration refuses is tested in `tests/engine_contract`.
"""

import pytest

from m3_paged_attention import CacheConfig, ConfigError, LLMEngine, ModelConfig, SchedulerConfig


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
