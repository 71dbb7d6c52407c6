"""What an m5 engine can be told of steps and guesses, and what a request can: checked when it is said."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from m5_chunked_prefill_spec import (
    CacheConfig,
    ConfigError,
    CostTable,
    EngineConfig,
    InvalidRequestError,
    LLMEngine,
    ModelConfig,
    PromptTooLongError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    TraceConfig,
)
from m5_chunked_prefill_spec.config import MAX_SPECULATIVE_TOKENS, ScheduleName, SpeculativeMethod
from m5_chunked_prefill_spec.model_runner import ModelRunner
from tests.m5_chunked_prefill_spec.engines import COSTS, Guessing, MakeEngine, greedy, ids, scheduler_of, setting
from tests.support.engines import Recorder


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs=0"),
        (SchedulerConfig, {"max_num_seqs": None}, "max_num_seqs=None"),
        (SchedulerConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        (SchedulerConfig, {"max_num_batched_tokens": 256.0}, "max_num_batched_tokens=256.0"),
        (SchedulerConfig, {"max_num_seqs": 16, "max_num_batched_tokens": 15}, "15 is less than max_num_seqs=16"),
        (SchedulerConfig, {"schedule": "both"}, "schedule='both' is unknown: use decode_first or prefill_first"),
        (SchedulerConfig, {"schedule": None}, "schedule=None"),
        (SchedulerConfig, {"enable_chunked_prefill": 1}, "enable_chunked_prefill=1 must be True or False"),
        (SchedulerConfig, {"enable_chunked_prefill": None}, "enable_chunked_prefill=None"),
        (SchedulerConfig, {"chunked_prefill_size": 0}, "chunked_prefill_size=0"),
        (SchedulerConfig, {"chunked_prefill_size": -1}, "chunked_prefill_size=-1"),
        (SchedulerConfig, {"chunked_prefill_size": 1.5}, "chunked_prefill_size=1.5"),
        (SchedulerConfig, {"chunked_prefill_size": True}, "chunked_prefill_size=True"),
        (SchedulerConfig, {"target_gap_ms": 0}, "target_gap_ms=0 must be a number greater than 0"),
        (SchedulerConfig, {"target_gap_ms": -5.0}, "target_gap_ms=-5.0"),
        (SchedulerConfig, {"target_gap_ms": float("nan")}, "target_gap_ms=nan"),
        (SchedulerConfig, {"target_gap_ms": float("inf")}, "target_gap_ms=inf"),
        (SchedulerConfig, {"target_gap_ms": "20"}, "target_gap_ms='20'"),
        (SchedulerConfig, {"target_gap_ms": True}, "target_gap_ms=True"),
        (SchedulerConfig, {"schedule_policy": "sjf"}, "schedule_policy='sjf' is unknown: use fcfs or lpm"),
        (SchedulerConfig, {"schedule_conservativeness": -0.1}, "schedule_conservativeness=-0.1 must be a number of at"),
        (SchedulerConfig, {"schedule_conservativeness": None}, "schedule_conservativeness=None"),
        (SchedulerConfig, {"cost_table": {1: 2.0}}, "cost_table={1: 2.0} must be a CostTable"),
        (SpeculativeConfig, {"method": "eagle"}, "method='eagle' is unknown: use ngram or draft_model"),
        (SpeculativeConfig, {"method": False}, "method=False"),
        (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens": None}, "num_speculative_tokens=None"),
        (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens": 65}, "65 must be at most 64"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_max=0 must be a whole number"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max='4' must be"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_min": 1.0}, "prompt_lookup_min=1.0"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_min": 5}, "=5 is more than prompt_lookup_max=4"),
        (SpeculativeConfig, {"method": "draft_model", "model": 5}, "model=5"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (
            SchedulerConfig,
            {"enable_chunked_prefill": False, "chunked_prefill_size": 16},
            "chunked_prefill_size has no effect with enable_chunked_prefill=False",
        ),
        (
            SchedulerConfig,
            {"enable_chunked_prefill": False, "target_gap_ms": 20.0},
            "target_gap_ms has no effect with enable_chunked_prefill=False",
        ),
        (
            SchedulerConfig,
            {"schedule": "prefill_first", "target_gap_ms": 20.0},
            "target_gap_ms has no effect with schedule='prefill_first'",
        ),
        (SpeculativeConfig, {"num_speculative_tokens": 5}, "num_speculative_tokens has no effect with method=None"),
        (SchedulerConfig, {"cost_table": COSTS}, "cost_table has no effect without target_gap_ms: give both"),
        (SpeculativeConfig, {"prompt_lookup_max": 5}, "prompt_lookup_max has no effect with method=None: use ngram"),
        (SpeculativeConfig, {"model": "/there"}, "model has no effect with method=None: use draft_model"),
        (SpeculativeConfig, {"method": "ngram", "model": "/there"}, "model has no effect with method='ngram'"),
        (
            SpeculativeConfig,
            {"method": "draft_model", "prompt_lookup_min": 1},
            "prompt_lookup_min has no effect with method='draft_model': use ngram",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_would_have_no_effect_is_refused(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)


def test_what_is_right_is_accepted() -> None:
    for schedule in get_args(ScheduleName):
        assert SchedulerConfig(schedule=schedule, chunked_prefill_size=1)
    assert SchedulerConfig(target_gap_ms=20, cost_table=COSTS, chunked_prefill_size=8)
    assert SchedulerConfig(schedule="prefill_first", enable_chunked_prefill=False)
    for method in get_args(SpeculativeMethod):
        assert SpeculativeConfig(method=method, num_speculative_tokens=MAX_SPECULATIVE_TOKENS)
    assert SpeculativeConfig(method="ngram", prompt_lookup_min=3, prompt_lookup_max=3)


@pytest.mark.parametrize(
    "values",
    [
        {"num_tokens": (1,), "step_ms": (1.0,)},
        {"num_tokens": (2, 4), "step_ms": (1.0, 2.0)},
        {"num_tokens": (1, 4), "step_ms": (1.0, 2.0, 3.0)},
        {"num_tokens": (1, 4, 4), "step_ms": (1.0, 2.0, 3.0)},
        {"num_tokens": (1, 4), "step_ms": (2.0, 1.0)},
        {"num_tokens": (1, 4), "step_ms": (0.0, 1.0)},
        {"num_tokens": (1, 4), "step_ms": (1.0, float("nan"))},
        {"num_tokens": (1, 4), "step_ms": (1.0, 2.0), "context_ms": -1.0},
    ],
    ids=str,
)
def test_a_cost_table_that_says_nothing_sensible_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostTable(**values)


def test_defaults() -> None:
    config = EngineConfig()
    assert (config.model, config.scheduler, config.cache) == (ModelConfig(), SchedulerConfig(), CacheConfig())
    assert (config.speculative, config.trace) == (SpeculativeConfig(), TraceConfig())
    names = [field.name for field in dataclasses.fields(config)]
    assert names == ["model", "trace", "scheduler", "cache", "speculative"]
    scheduler = SchedulerConfig()
    assert (scheduler.schedule, scheduler.schedule_policy, scheduler.enable_chunked_prefill) == (
        "decode_first",
        "lpm",
        True,
    )
    assert (scheduler.chunked_prefill_size, scheduler.target_gap_ms, scheduler.cost_table) == (None, None, None)
    assert SpeculativeConfig().method is None


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
def test_without_a_budget_a_step_is_short_or_where_prompts_are_whole_long_enough(
    values: dict[str, Any], model_len: int, budget: int
) -> None:
    config = SchedulerConfig(**values)
    assert config.resolved(model_len, "cpu") == dataclasses.replace(config, max_num_batched_tokens=budget)


def test_a_step_on_a_gpu_is_larger_unless_it_is_told_otherwise() -> None:
    assert SchedulerConfig().resolved(4096, "cuda").max_num_batched_tokens == 2048
    assert SchedulerConfig(max_num_seqs=3000).resolved(4096, "cuda").max_num_batched_tokens == 3000
    assert SchedulerConfig(max_num_batched_tokens=64).resolved(4096, "cuda").max_num_batched_tokens == 64


@pytest.mark.parametrize("config", [SchedulerConfig, SpeculativeConfig, EngineConfig])
def test_configurations_take_keywords_only_and_are_frozen(config: Any) -> None:
    with pytest.raises(TypeError):
        config(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, 3)
    with pytest.raises(ConfigError, match="speculative_config"):
        LLMEngine("/nowhere", speculative_config=SchedulerConfig())


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
def test_prompts_that_are_cut_at_pages_need_a_step_with_room_for_a_page(
    make_engine: MakeEngine, limits: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is less than a page of page_size=16 tokens"):
        make_engine(**setting(page_size=16, schedule="prefill_first", **limits))
    make_engine(**setting(page_size=16, schedule="decode_first", **limits)).close()
    assert make_engine(**setting(page_size=15, schedule="prefill_first", **limits)).generate(ids(40), greedy(2))


@pytest.mark.parametrize("more", [{}, {"method": "ngram"}, {"method": "draft_model"}], ids=str)
def test_steps_are_not_measured_without_a_target(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(ModelRunner, "measure_costs", None)
    engine = make_engine(**setting(**more))
    assert scheduler_of(engine).composer.cost_table is None  # type: ignore[attr-defined]
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


def test_a_cost_table_that_is_given_is_not_measured(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "measure_costs", None)
    engine = make_engine(**setting(target_gap_ms=50.0, cost_table=COSTS))
    assert scheduler_of(engine).composer.cost_table == COSTS  # type: ignore[attr-defined]


# --- intake -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_longer_than_a_step_is_taken_if_it_may_be_cut(make_engine: MakeEngine, m1: Any) -> None:
    engine = make_engine(**setting(4, 16))
    recorder = Recorder(engine.tracer)
    assert engine.generate(ids(70), greedy(4)).token_ids == m1.generate(ids(70), greedy(4)).token_ids
    assert [cut.given for cut in recorder.events("chunk_cut")] == [16, 16, 16, 16]


def test_and_refused_if_not(make_engine: MakeEngine) -> None:
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


@pytest.mark.parametrize("value", [None, 1, 0, "no", 4], ids=str)
def test_whether_to_speculate_is_yes_or_no(make_engine: MakeEngine, value: Any) -> None:
    engine = make_engine(**setting(method="ngram"))
    with pytest.raises(InvalidRequestError, match=r"speculate=.* must be True or False"):
        engine.add_request(ids(5), greedy(4), speculate=value)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_wants_no_guesses_gets_none(make_engine: MakeEngine, n: int) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=n)
    counts = {}
    for speculate in (True, False):
        engine = make_engine({"proposer": Guessing}, **setting(method="ngram"))
        engine.add_request(ids(9), params, request_id="r", speculate=speculate)
        while engine.has_unfinished_requests():
            engine.step()
        counts[speculate] = engine.stats().num_draft_tokens
    assert counts[True] > 0 and counts[False] == 0


def test_where_nothing_is_guessed_nobody_needs_to_say_so(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting())
    for speculate in (True, False):
        engine.add_request(ids(5), greedy(3), speculate=speculate)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats().num_draft_tokens == 0
