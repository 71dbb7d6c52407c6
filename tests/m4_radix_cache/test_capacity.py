"""When memory is short: who can never run is refused, who outgrows it fails alone, and all others are served."""

from pathlib import Path
from typing import Any

import pytest

from m4_radix_cache import CacheConfig, ConfigError, KVCapacityError, LLMEngine, ModelConfig, SchedulerConfig
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.m4_radix_cache.engines import MAX_MODEL_LEN, MakeEngine, Recorder, check_drained, greedy, ids, run, setting

# --- who can never run ------------------------------------------------------------------------------------------------


def test_a_prompt_over_the_whole_pool_is_refused_with_all_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, tokens=12))
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(KVCapacityError, match=r"'big' has 11 prompt tokens.* room for 12, .* must leave 2 of them"):
            call(ids(11), greedy(2), request_id="big")
    assert not engine.has_unfinished_requests()
    (refused, runs) = engine.generate_batch([ids(11), ids(3)], greedy(2)).values()
    assert isinstance(refused.error, KVCapacityError) and refused.finish_reason == "error"
    assert runs.finish_reason == "length"
    check_drained(engine)


def test_a_prompt_over_the_token_budget_is_refused_even_if_it_is_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, 8))
    engine.generate(ids(6), greedy(6))
    with pytest.raises(Exception, match="9") as caught:
        engine.add_request(ids(9), greedy(2))
    assert "max_num_batched_tokens" in str(caught.value)


@pytest.mark.parametrize(("length", "page_size"), [(10, 4), (10, 1), (10, 2)])
def test_the_longest_prompt_that_is_welcome_runs_and_fills_the_pool(
    make_engine: MakeEngine, cache: str, length: int, page_size: int
) -> None:
    engine = make_engine(**setting(2, tokens=12, page_size=page_size, cache=cache))
    assert engine.generate(ids(length), greedy(3)).finish_reason == "length"
    output = engine.generate(ids(length), greedy(4))
    assert (output.finish_reason, len(output.token_ids)) == ("error", 3)
    assert isinstance(output.error, KVCapacityError) and "13 tokens" in str(output.error)
    assert engine.generate(ids(length), greedy(3)).finish_reason == "length"


# --- who outgrows the pool alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_sequence_that_outgrows_the_pool_ends_with_what_it_said_and_the_others_go_on(
    make_engine: MakeEngine, make_m1: Any, cache: str, page_size: int
) -> None:
    engine = make_engine(**setting(3, tokens=24, page_size=page_size, cache=cache, conservativeness=0))
    alone = make_m1()
    engine.add_request(ids(5), greedy(40), request_id="big")
    engine.add_request(ids(3, 9), greedy(12), request_id="small")
    engine.add_request(ids(4, 7), greedy(9), request_id="late")
    outputs = run(engine)
    assert isinstance(outputs["big"].error, KVCapacityError) and "'big'" in str(outputs["big"].error)
    assert outputs["big"].token_ids == alone.generate(ids(5), greedy(20)).token_ids, "20 tokens have room beside it"
    assert outputs["small"].token_ids == alone.generate(ids(3, 9), greedy(12)).token_ids
    assert outputs["late"].token_ids == alone.generate(ids(4, 7), greedy(9)).token_ids
    assert engine.stats().num_finished == {"error": 1, "length": 2}
    assert engine.generate(ids(5), greedy(15)).finish_reason == "length"


def test_three_that_outgrow_the_pool_end_one_after_the_other(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(**setting(4, tokens=8, page_size=2, cache=cache, conservativeness=0))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(2), greedy(50), request_id=rid)
    outputs = run(engine)
    assert [len(outputs[rid].token_ids) for rid in "abc"] == [7] * 3, "each had the whole pool in the end"
    assert all(isinstance(output.error, KVCapacityError) for output in outputs.values())


def test_a_pool_of_one_page_serves_one_after_the_other(make_engine: MakeEngine, make_m1: Any, cache: str) -> None:
    engine = make_engine(**setting(4, tokens=8, page_size=8, cache=cache))
    alone = make_m1()
    for n in range(1, 7):
        engine.add_request(ids(n), greedy(9 - n), request_id=str(n))
    engine.add_request(ids(4), greedy(9), request_id="outgrows")
    outputs = run(engine)
    for n in range(1, 7):
        assert outputs[str(n)].token_ids == alone.generate(ids(n), greedy(9 - n)).token_ids
    assert len(outputs["outgrows"].token_ids) == 5 and isinstance(outputs["outgrows"].error, KVCapacityError)


def test_a_pool_of_three_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, tokens=3, page_size=1))
    outputs = [engine.generate([5], greedy(n)) for n in (1, 3, 4)]
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 1), ("length", 3), ("error", 3)]


def test_a_family_that_does_not_fit_together_runs_in_turns(make_engine: MakeEngine, make_m1: Any, cache: str) -> None:
    engine = make_engine(**setting(4, tokens=14, page_size=2, cache=cache, conservativeness=0))
    output = engine.generate(ids(7), greedy(5, n=4, temperature=1.0, seed=3))
    alone = make_m1()
    for index, completion in enumerate(output.outputs):
        expected = alone.generate(ids(7), greedy(5, temperature=1.0, seed=3 + index))
        assert (completion.finish_reason, completion.token_ids) == ("length", expected.token_ids)
    check_drained(engine)


# --- a pool that is always full ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule_policy", ["fcfs", "lpm"])
def test_many_turns_through_a_pool_in_which_eviction_never_stops(
    make_engine: MakeEngine, make_m1: Any, cache: str, schedule_policy: str
) -> None:
    engine = make_engine(
        **setting(3, tokens=40, page_size=2, cache=cache, policy=schedule_policy, conservativeness=0.2)
    )
    asked = {str(n): (ids(3 + 5 * (n % 4), 5 + n % 2), greedy(4 + n % 5)) for n in range(12)}
    for rid, (prompt, params) in asked.items():
        engine.add_request(prompt, params, request_id=rid)
    outputs, alone = run(engine), make_m1()
    for rid, (prompt, params) in asked.items():
        assert outputs[rid].token_ids == alone.generate(prompt, params).token_ids, rid
    assert cache == "chunk" or engine.stats().num_evicted_tokens > 0


def test_a_retracted_request_longer_than_the_token_budget_runs_alone(make_engine: MakeEngine, make_m1: Any) -> None:
    engine = make_engine(**setting(2, 8, tokens=28, page_size=2, cache="chunk", conservativeness=0))
    recorder = Recorder(engine.tracer)
    for n in (0, 1):
        engine.add_request(ids(7, n), greedy(9), request_id=str(n))
    outputs = run(engine)
    over = [batch for batch in recorder.events("batch") if batch.total_tokens > 8]
    assert over and all(len(batch.rids) == 1 and batch.mode == "extend" for batch in over)
    alone = make_m1()
    for n in (0, 1):
        assert outputs[str(n)].token_ids == alone.generate(ids(7, n), greedy(9)).token_ids


def test_a_stream_tells_each_token_once_however_often_its_request_loses_its_place(
    make_engine: MakeEngine, make_m1: Any, cache: str
) -> None:
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(3, tokens=60, page_size=2, cache=cache))
    streams = {n: engine.stream(ids(5 + n, n), greedy(9)) for n in range(3)}
    told: dict[int, list[tuple[int, ...]]] = {n: [] for n in streams}
    for outputs in zip(*streams.values(), strict=True):
        for n, output in enumerate(outputs):
            told[n].append(output.token_ids)
    assert engine.stats().num_retractions > 2
    alone = make_m1()
    for n, parts in told.items():
        whole = alone.generate(ids(5 + n, n), greedy(9)).token_ids
        assert parts == [whole[: length + 1] for length in range(9)], "one more with each output, and none again"


# --- sizing -----------------------------------------------------------------------------------------------------------


def tiny(directory: Path, max_model_len: int | None = None) -> ModelConfig:
    return ModelConfig(model=directory, device="cpu", dtype="float32", max_model_len=max_model_len)


def test_a_size_in_tokens_is_rounded_down_to_pages(make_engine: MakeEngine) -> None:
    assert make_engine(**setting(tokens=15, page_size=4)).stats().max_total_tokens == 12


def test_a_pool_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one page of page_size=16"):
        CacheConfig(max_total_tokens=15)


def test_too_small_a_budget_names_what_works_and_it_works(tiny_directory: Path, loaded: Any) -> None:
    cache = CacheConfig(page_size=16, kv_cache_memory_bytes=(5 * 16 + 15) * loaded.kv_bytes_per_token)
    with pytest.raises(ConfigError, match=rf"of {MAX_MODEL_LEN} tokens.*max_model_len of at most 64 or"):
        LLMEngine(model_config=tiny(tiny_directory), cache_config=cache)
    limits = SchedulerConfig(max_num_seqs=2)
    with LLMEngine(model_config=tiny(tiny_directory, 64), cache_config=cache, scheduler_config=limits) as engine:
        assert engine.stats().max_total_tokens == 64
        assert len(engine.generate(ids(60), greedy(3)).token_ids) == 3


@pytest.mark.exhaustive
def test_what_is_not_needed_for_running_is_of_use_for_the_cache(make_engine: MakeEngine) -> None:
    """A default pool is larger than all that may run: what ended stays."""
    engine = make_engine(scheduler_config=SchedulerConfig(max_num_seqs=1))
    assert engine.stats().max_total_tokens > MAX_MODEL_LEN


def test_as_many_may_run_as_anybody_likes(make_engine: MakeEngine) -> None:
    """Rows are made when they are needed; memory decides how many that are."""
    engine = make_engine(**setting(10**12))
    outputs = engine.generate_batch([[5 + n % 90, 6 + n % 7] for n in range(200)], greedy(2), progress=False)
    assert all(len(output.token_ids) == 2 for output in outputs.values())
    check_drained(engine)
