"""What an m5 engine can be told of steps and guesses, and what a request can: checked when it is said."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from m3_paged_attention.device_limits import DeviceLimits
from m5_chunked_prefill_spec import (
    ConfigError,
    InvalidRequestError,
    LLMEngine,
    ModelConfig,
    PromptTooLongError,
    SchedulerConfig,
    SpeculativeConfig,
)
from m5_chunked_prefill_spec.model_runner import ModelRunner
from tests.equivalence.models import save_random_model
from tests.m5_chunked_prefill_spec.engines import COSTS, MakeEngine, greedy, ids, runner_of, scheduler_of, setting


@pytest.mark.parametrize(
    ("make", "name", "values", "instead"),
    [
        (SchedulerConfig, "chunked_prefill_size", {"enable_chunked_prefill": False}, ""),
        (SchedulerConfig, "target_gap_ms", {"enable_chunked_prefill": False}, ""),
        (SchedulerConfig, "target_gap_ms", {"schedule": "prefill_first"}, ""),
        (SpeculativeConfig, "num_speculative_tokens", {"method": None}, ""),
        (SpeculativeConfig, "prompt_lookup_max", {"method": None}, ": use ngram"),
        (SpeculativeConfig, "prompt_lookup_min", {"method": "draft_model"}, ": use ngram"),
        (SpeculativeConfig, "model", {"method": None}, ": use draft_model"),
        (SpeculativeConfig, "model", {"method": "ngram"}, ""),
    ],
    ids=str,
)
def test_the_message_names_the_setting_without_effect(make: Any, name: str, values: Any, instead: str) -> None:
    ((other, value),) = values.items()
    with pytest.raises(ConfigError, match=f"{name} has no effect with {other}={value!r}{instead}"):
        make(**{name: "/there" if name == "model" else 3} | values)


@pytest.mark.parametrize(
    ("values", "model_len", "budget"),
    [
        ({}, 512, 128),
        ({}, 40_960, 128),
        ({"max_num_seqs": 300}, 512, 300),
        ({"enable_chunked_prefill": False}, 512, 2048),
        ({"enable_chunked_prefill": False}, 40_960, 40_960),
        ({"max_num_batched_tokens": 64}, 40_960, 64),
    ],
    ids=str,
)
def test_a_budget_by_default_is_short_or_fits_whole_prompts(
    values: dict[str, Any], model_len: int, budget: int
) -> None:
    config = SchedulerConfig(**values)
    seqs = values.get("max_num_seqs", 16)
    resolved = dataclasses.replace(config, max_num_seqs=seqs, max_num_batched_tokens=budget)
    assert config.resolved(model_len) == resolved


def test_a_step_on_a_gpu_is_larger_unless_it_is_told_otherwise() -> None:
    gpu = DeviceLimits(max_num_seqs=256, max_num_batched_tokens=4096, total_bytes=48 * 2**30)

    def limits(**values: Any) -> tuple[int | None, int | None]:
        resolved = SchedulerConfig(**values).resolved(8192, gpu)
        return resolved.max_num_seqs, resolved.max_num_batched_tokens

    assert limits() == (256, 4096)
    assert limits(max_num_seqs=5000) == (5000, 5000)
    assert limits(max_num_batched_tokens=64) == (64, 64), "all running requests have a place in a step"
    assert limits(max_num_seqs=8, max_num_batched_tokens=64) == (8, 64)
    assert limits(enable_chunked_prefill=False) == (256, 8192)


# --- what fits together, once the model is known ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens=15"),
        ({"max_num_batched_tokens": 64, "chunked_prefill_size": 15}, "chunked_prefill_size=15"),
        ({"max_num_batched_tokens": 15, "chunked_prefill_size": 64}, "max_num_batched_tokens=15"),
    ],
    ids=str,
)
def test_prompts_cut_at_pages_need_a_step_of_a_page(make_engine: MakeEngine, limits: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is less than a page of page_size=16 tokens"):
        make_engine(**setting(page_size=16, schedule="prefill_first", **limits))
    make_engine(**setting(page_size=16, schedule="decode_first", **limits)).close()
    assert make_engine(**setting(page_size=15, schedule="prefill_first", **limits)).generate(ids(40), greedy(2))


@pytest.mark.parametrize("more", [{}, {"method": "ngram"}, {"method": "draft_model"}], ids=str)
def test_steps_are_measured_if_needed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(ModelRunner, "measure_costs", None)
    for limits, costs in (({}, None), ({"target_gap_ms": 50.0, "cost_table": COSTS}, COSTS)):
        engine = make_engine(**setting(**more, **limits))
        assert scheduler_of(engine).composer.cost_table == costs  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        make_engine(**setting(**more, target_gap_ms=50.0, cost_table=None))


@pytest.mark.parametrize("max_model_len", [5, 40, 100])
def test_steps_are_measured_that_are_larger_than_the_longest_request(tiny_directory: Path, max_model_len: int) -> None:
    """A step has a budget of its own: several requests fill it, and none has a position that the model lacks."""
    limits = setting(max_num_batched_tokens=130, target_gap_ms=50.0, cost_table=None)
    model = ModelConfig(model=tiny_directory, device="cpu", max_model_len=max_model_len)
    with LLMEngine(model_config=model, **limits) as engine:
        table = scheduler_of(engine).composer.cost_table  # type: ignore[attr-defined]
        assert table.num_tokens[:8] == (1, 2, 4, 8, 16, 32, 64, 128)


def test_steps_are_measured_with_many_different_tokens(tmp_path: Path) -> None:
    """Equal tokens would all read the same few experts, and no step of an engine costs so little."""
    directory, read = save_random_model(tmp_path, "qwen3_moe"), dict[int, set[int]]()
    with LLMEngine(model_config=ModelConfig(model=directory, device="cpu", dtype="float32")) as engine:
        runner: Any = runner_of(engine)
        mlp = runner.model.layers[0].mlp
        mlp.observe = lambda experts: read.setdefault(len(experts), set()).add(len(experts.unique()))
        runner.measure_costs(64)
    assert read[1] == {2} and read[64] == {5}, "two of five experts for a token, and all for many"


# --- intake -----------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_step_is_refused_if_it_may_not_be_cut(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, 16, enable_chunked_prefill=False))
    with pytest.raises(PromptTooLongError, match=r"17.*16"):
        engine.add_request(ids(17), greedy(4))
    assert engine.generate(ids(16), greedy(4)).finish_reason == "length"


@pytest.mark.parametrize("chunks", [True, False])
def test_what_can_never_run_is_refused_whether_it_may_be_cut_or_not(make_engine: MakeEngine, chunks: bool) -> None:
    engine = make_engine(max_model_len=60, **setting(4, 64, tokens=40, enable_chunked_prefill=chunks))
    for length in (60, 61, 39):  # the model's length, and the memory's
        with pytest.raises(InvalidRequestError):
            engine.add_request(ids(length), greedy(4))
    assert engine.generate(ids(38), greedy(1)).finish_reason == "length"
