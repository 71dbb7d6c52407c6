"""The configurations of all milestones: what they are made of, the limits of a batch, and what they refuse alike."""

import dataclasses
import importlib
from itertools import combinations
from typing import Any

import pytest

from m1_single_request.errors import ConfigError
from tests.events.milestones import MILESTONES
from tests.support.wrong_values import Wrong, check_refused, each_of

PACKAGES = [importlib.import_module(milestone) for milestone in MILESTONES]
BATCHING, PAGED = PACKAGES[1:], PACKAGES[2:]
WRONG: Wrong = {
    package.SchedulerConfig: {
        "max_num_seqs": (0, -3, 2.0, True, "4"),
        "max_num_batched_tokens": (0, False, 512.5, "512"),
    }
    for package in BATCHING
}
KEYWORDS = {
    "m1_single_request": "model trace",
    "m2_continuous_batching": "model trace scheduler",
    "m3_paged_attention": "model trace scheduler cache",
    "m4_radix_cache": "model trace scheduler cache",
    "m5_chunked_prefill_spec": "model trace scheduler cache speculative",
    "m6_multimodal_pd": "model trace scheduler cache speculative multimodal disaggregation",
    "m8_parallel": "model trace scheduler cache speculative multimodal disaggregation parallel",
}
"""What an engine of each milestone can be told: `model_config=` and so on."""

each_package = pytest.mark.parametrize("package", PACKAGES, ids=MILESTONES)
each_batching = pytest.mark.parametrize("package", BATCHING, ids=MILESTONES[1:])


@each_package
def test_configurations_take_keywords_only_and_are_frozen(package: Any) -> None:
    for name in (name for name in package.__all__ if name.endswith("Config")):
        config = getattr(package, name)
        with pytest.raises(TypeError, match="positional"):
            config(4)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(object.__new__(config), dataclasses.fields(config)[0].name, 3)


@each_package
def test_an_engine_is_told_of_the_parts_of_its_milestone_by_their_names(package: Any) -> None:
    config = package.EngineConfig()
    assert [field.name for field in dataclasses.fields(config)] == KEYWORDS[package.__name__].split()
    for field in dataclasses.fields(config):
        default = getattr(package, f"{field.name.title()}Config")() if field.name != "disaggregation" else None
        assert getattr(config, field.name) == default
        with pytest.raises(ConfigError, match=f"{field.name}_config= must be a"):
            package.LLMEngine(**{f"{field.name}_config": package.EngineConfig()})
    with pytest.raises(ConfigError, match="unheard_of_config= is unknown here"):
        package.LLMEngine("/nowhere", unheard_of_config=None)


@each_of(WRONG)
def test_a_wrong_limit_is_refused_with_its_value(make: Any, name: str, value: Any) -> None:
    check_refused(make, name, value)


@each_batching
def test_a_budget_without_a_token_for_everybody_who_runs_is_refused(package: Any) -> None:
    for seqs, tokens in ((2, 1), (16, 15), (64, 8)):
        with pytest.raises(ConfigError, match=f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}"):
            package.SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    if package is not BATCHING[0]:
        with pytest.raises(ConfigError, match=r"max_num_seqs=16 \(its default\): .*; set max_num_seqs to 8 or less"):
            package.SchedulerConfig(max_num_batched_tokens=8)
    enough = package.SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=7)
    assert enough.resolved(100).max_num_batched_tokens == 7


@pytest.mark.parametrize("package", BATCHING[:3], ids=MILESTONES[1:4])
def test_without_a_budget_no_prompt_and_no_decode_is_refused_for_it(package: Any) -> None:
    """Where prompts run whole."""
    for seqs, model_len, budget in ((16, 512, 2048), (16, 2048, 2048), (16, 40_960, 40_960), (5000, 512, 5000)):
        config = package.SchedulerConfig(max_num_seqs=seqs)
        assert config.resolved(model_len) == dataclasses.replace(config, max_num_batched_tokens=budget)
        assert config.max_num_batched_tokens is None, "the configuration itself stays as it was"
        given = package.SchedulerConfig(max_num_batched_tokens=64)
        assert given.resolved(model_len) == dataclasses.replace(given, max_num_seqs=16)


@pytest.mark.parametrize("package", PAGED, ids=MILESTONES[2:])
def test_only_one_setting_may_say_how_much_memory_there_is(package: Any) -> None:
    count = "num_blocks" if package.__name__ == "m3_paged_attention" else "max_total_tokens"
    values: dict[str, Any] = {count: 64, "kv_cache_memory_bytes": 2**20, "gpu_memory_utilization": 0.5}
    for names in (*combinations(values, 2), tuple(values)):
        with pytest.raises(ConfigError, match="set the size of the KV memory: give one of them") as caught:
            package.CacheConfig(**{name: values[name] for name in names})
        assert all(name in str(caught.value) for name in names)
