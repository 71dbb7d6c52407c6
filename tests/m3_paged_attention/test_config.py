"""The settings of m3: limits, KV memory, kernels. They are checked when a configuration is made."""

import dataclasses
from typing import Any

import pytest

from m3_paged_attention import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    LLMEngine,
    ModelConfig,
    SchedulerConfig,
    TraceConfig,
)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs=0"),
        (SchedulerConfig, {"max_num_seqs": 2.0}, "max_num_seqs=2.0"),
        (SchedulerConfig, {"max_num_seqs": True}, "max_num_seqs=True"),
        (SchedulerConfig, {"max_num_seqs": None}, "max_num_seqs=None"),
        (SchedulerConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        (SchedulerConfig, {"max_num_batched_tokens": "512"}, "max_num_batched_tokens='512'"),
        (SchedulerConfig, {"preemption_mode": "drop"}, "preemption_mode='drop' is unknown: use recompute or swap"),
        (SchedulerConfig, {"preemption_mode": None}, "preemption_mode=None"),
        (CacheConfig, {"block_size": 0}, "block_size=0"),
        (CacheConfig, {"block_size": 16.0}, "block_size=16.0"),
        (CacheConfig, {"block_size": None}, "block_size=None"),
        (CacheConfig, {"num_blocks": 0}, "num_blocks=0"),
        (CacheConfig, {"num_blocks": True}, "num_blocks=True"),
        (CacheConfig, {"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        (CacheConfig, {"kv_cache_memory_bytes": 1e9}, "kv_cache_memory_bytes=1000000000.0"),
        (CacheConfig, {"swap_space_bytes": -1}, "swap_space_bytes=-1"),
        (CacheConfig, {"gpu_memory_utilization": 0}, "gpu_memory_utilization=0 must be"),
        (CacheConfig, {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        (CacheConfig, {"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
        (CacheConfig, {"gpu_memory_utilization": True}, "gpu_memory_utilization=True"),
        (CacheConfig, {"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'"),
        (
            ModelConfig,
            {"attention_backend": "flash"},
            "attention_backend='flash' is unknown: use auto or native or torch or triton",
        ),
        (ModelConfig, {"attention_backend": None}, "attention_backend=None"),
        (ModelConfig, {"load_format": "gguf"}, "load_format='gguf' is unknown: use auto or dummy"),
        (ModelConfig, {"load_format": 1}, "load_format=1"),
        (ModelConfig, {"device": "nowhere"}, "device='nowhere'"),
        (ModelConfig, {"dtype": "int8"}, "dtype='int8'"),
        (ModelConfig, {"max_model_len": 1}, "max_model_len=1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_blocks": 4, "kv_cache_memory_bytes": 2**20},
        {"num_blocks": 4, "gpu_memory_utilization": 0.5},
        {"kv_cache_memory_bytes": 2**20, "gpu_memory_utilization": 0.5},
        {"num_blocks": 4, "kv_cache_memory_bytes": 2**20, "gpu_memory_utilization": 0.5},
    ],
    ids=str,
)
def test_only_one_setting_may_say_how_much_memory_there_is(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set the size of the KV memory: give one of them"):
        CacheConfig(**values)


def test_each_setting_alone_is_accepted() -> None:
    for values in ({"num_blocks": 1}, {"kv_cache_memory_bytes": 1}, {"gpu_memory_utilization": 1}, {"block_size": 1}):
        assert CacheConfig(**values)
    assert (CacheConfig().block_size, CacheConfig().num_blocks) == (16, None)


@pytest.mark.parametrize(("seqs", "tokens"), [(2, 1), (16, 15), (64, 8)])
def test_a_budget_without_a_token_for_everybody_who_runs_is_refused(seqs: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}"):
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)


@pytest.mark.parametrize(
    ("seqs", "model_len", "budget"),
    [(16, 512, 2048), (16, 40_960, 40_960), (5000, 512, 5000)],
    ids=["a short model", "a long model", "many sequences"],
)
def test_without_a_budget_no_prompt_and_no_decode_is_refused_for_it(seqs: int, model_len: int, budget: int) -> None:
    config = SchedulerConfig(max_num_seqs=seqs, preemption_mode="swap")
    resolved = config.resolved(model_len)
    assert resolved == SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, preemption_mode="swap")
    assert config.max_num_batched_tokens is None, "the configuration itself stays as it was"
    assert SchedulerConfig(max_num_batched_tokens=64).resolved(model_len).max_num_batched_tokens == 64


def test_what_m2_could_be_told_and_m3_cannot_is_an_error() -> None:
    with pytest.raises(TypeError, match="execution"):
        SchedulerConfig(execution="padded")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="cache_config"):
        LLMEngine("/nowhere", cache_config=SchedulerConfig())
    with pytest.raises(ConfigError, match="speculative_config"):
        LLMEngine("/nowhere", speculative_config=None)


@pytest.mark.parametrize("config", [ModelConfig, SchedulerConfig, CacheConfig, EngineConfig])
def test_configurations_take_keywords_only_and_are_frozen(config: Any) -> None:
    with pytest.raises(TypeError):
        config(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, 3)


def test_an_engine_is_told_of_model_scheduler_cache_and_trace() -> None:
    config = EngineConfig()
    assert (config.model, config.scheduler) == (ModelConfig(), SchedulerConfig())
    assert (config.cache, config.trace) == (CacheConfig(), TraceConfig())
    assert [field.name for field in dataclasses.fields(config)] == ["model", "trace", "scheduler", "cache"]


def test_triton_on_a_cpu_without_its_interpreter_is_refused_when_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="attention_backend='triton' cannot run here"):
        LLMEngine(model_config=ModelConfig(device="cpu", attention_backend="triton"))
