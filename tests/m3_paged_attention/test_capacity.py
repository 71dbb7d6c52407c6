"""When memory is short: who can never run is refused, who outgrows it fails alone, and sizing says what would work."""

from pathlib import Path
from typing import Any

import pytest

from m1_single_request.errors import PartError
from m3_paged_attention import CacheConfig, ConfigError, KVCapacityError, LLMEngine, ModelConfig, SchedulerConfig
from m3_paged_attention.errors import OutOfBlocksError
from tests.m3_paged_attention.engines import (
    MAX_MODEL_LEN,
    MakeEngine,
    Recorder,
    check_drained,
    greedy,
    held,
    ids,
    run,
    setting,
)

# --- who can never run ------------------------------------------------------------------------------------------------


def test_a_prompt_over_the_whole_pool_is_refused_with_all_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, blocks=3))
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(KVCapacityError, match=r"'big' has 13 prompt tokens.* 4 blocks of 4 .* has 3"):
            call(ids(13), greedy(2), request_id="big")
    assert not engine.has_unfinished_requests()
    (refused, runs) = engine.generate_batch([ids(13), ids(3)], greedy(2)).values()
    assert isinstance(refused.error, KVCapacityError) and refused.finish_reason == "error"
    assert runs.finish_reason == "length"
    check_drained(engine)


def test_a_prompt_that_fills_the_pool_yields_the_one_token_that_needs_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, blocks=3))
    assert engine.generate(ids(12), greedy(1)).finish_reason == "length"
    output = engine.generate(ids(12), greedy(2))
    assert (output.finish_reason, len(output.token_ids)) == ("error", 1)
    assert isinstance(output.error, KVCapacityError) and "13 tokens" in str(output.error)


# --- who outgrows the pool alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_sequence_that_outgrows_the_pool_ends_with_what_it_said_and_the_others_go_on(
    make_engine: MakeEngine, make_m1: Any, mode: str, block_size: int
) -> None:
    engine = make_engine(**setting(3, blocks=24 // block_size, block_size=block_size, mode=mode))
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


def test_two_that_both_outgrow_the_pool_end_one_after_the_other(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=4, block_size=2, mode=mode))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(2), greedy(50), request_id=rid)
    outputs = run(engine)
    assert [len(outputs[rid].token_ids) for rid in "abc"] == [7] * 3, "each had the whole pool in the end"
    assert all(isinstance(output.error, KVCapacityError) for output in outputs.values())


def test_a_pool_of_one_block_serves_one_after_the_other(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=1, block_size=8, mode=mode))
    alone = make_m1()
    for n in range(1, 9):
        engine.add_request(ids(n), greedy(9 - n), request_id=str(n))
    engine.add_request(ids(4), greedy(9), request_id="outgrows")
    outputs = run(engine)
    for n in range(1, 9):
        assert outputs[str(n)].token_ids == alone.generate(ids(n), greedy(9 - n)).token_ids
    assert len(outputs["outgrows"].token_ids) == 5 and isinstance(outputs["outgrows"].error, KVCapacityError)
    with pytest.raises(KVCapacityError, match="9 prompt tokens"):
        engine.add_request(ids(9))


def test_a_pool_of_one_block_of_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2, blocks=1, block_size=1))
    outputs = [engine.generate([5], greedy(n)) for n in (1, 2)]
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 1), ("error", 1)]


def test_a_family_that_does_not_fit_together_runs_in_turns(make_engine: MakeEngine, make_m1: Any, mode: str) -> None:
    """Four children of a prompt of 7 in 6 blocks of 2: alone each needs up to 6."""
    engine = make_engine(**setting(4, blocks=6, block_size=2, mode=mode))
    output = engine.generate(ids(7), greedy(5, n=4, temperature=1.0, seed=3))
    alone = make_m1()
    for index, completion in enumerate(output.outputs):
        expected = alone.generate(ids(7), greedy(5, temperature=1.0, seed=3 + index))
        assert (completion.finish_reason, completion.token_ids) == ("length", expected.token_ids)
    assert engine.stats().num_preemptions > 0
    check_drained(engine)


# --- who comes back ---------------------------------------------------------------------------------------------------


def test_a_resumed_request_longer_than_the_token_budget_runs_alone(make_engine: MakeEngine, make_m1: Any) -> None:
    engine = make_engine(**setting(2, 8, blocks=10, block_size=2))
    recorder = Recorder(engine.tracer)
    for n in (0, 1):
        engine.add_request(ids(7, n), greedy(9), request_id=str(n))
    outputs = run(engine)
    over = [batch for batch in recorder.events("batch") if batch.total_tokens > 8]
    assert over and all(len(batch.rids) == 1 and batch.prefix_lens == (0,) for batch in over)
    alone = make_m1()
    for n in (0, 1):
        assert outputs[str(n)].token_ids == alone.generate(ids(7, n), greedy(9)).token_ids


def test_host_memory_that_is_short_falls_back_to_recompute(make_engine: MakeEngine, make_m1: Any) -> None:
    spec = make_engine().engine_core.executor.kv_cache_spec(2)
    engine = make_engine(**setting(5, blocks=12, block_size=2, mode="swap", swap_space_bytes=5 * spec.block_bytes))
    recorder = Recorder(engine.tracer)
    for n in range(5):
        engine.add_request(ids(3, n), greedy(9), request_id=str(n))
    outputs = run(engine)
    assert {event.mode for event in recorder.events("preempted")} == {"recompute", "swap"}
    alone = make_m1()
    for n in range(5):
        assert outputs[str(n)].token_ids == alone.generate(ids(3, n), greedy(9)).token_ids


def test_a_kv_manager_that_runs_dry_is_a_bug_that_the_engine_survives(make_engine: MakeEngine) -> None:
    """The requests end with an error that names the part, and the engine goes on with empty memory."""
    engine = make_engine(**setting(2, blocks=4))
    engine.add_request(ids(3), greedy(3), request_id="a")
    pool = engine.engine_core.scheduler.kv_manager.pool
    allocate, left = pool.allocate, [1]

    def dry(count: int) -> list[int]:
        if left:
            left.pop()
            raise OutOfBlocksError("none left")
        return allocate(count)

    pool.allocate = dry
    error = engine.step()["a"].error
    assert isinstance(error, PartError) and isinstance(error.__cause__, OutOfBlocksError)
    assert "the part 'kv_manager' (KVCacheManager)" in str(error) and "none left" in str(error)
    assert engine.generate(ids(3), greedy(3)).finish_reason == "length"


# --- sizing -----------------------------------------------------------------------------------------------------------


def tiny(directory: Path, max_model_len: int | None = None) -> ModelConfig:
    return ModelConfig(model=directory, device="cpu", dtype="float32", max_model_len=max_model_len)


def test_too_small_a_budget_names_the_length_that_works_and_it_works(tiny_directory: Path, loaded: Any) -> None:
    per_token = loaded.kv_bytes_per_token
    cache = CacheConfig(block_size=16, kv_cache_memory_bytes=(5 * 16 + 15) * per_token)  # block 0, and four more
    with pytest.raises(ConfigError, match=rf"of {MAX_MODEL_LEN} tokens.*max_model_len of at most 64 or") as caught:
        LLMEngine(model_config=tiny(tiny_directory), cache_config=cache)
    least = int(str(caught.value).rsplit(" ", 1)[-1].replace(",", ""))
    limits = SchedulerConfig(max_num_seqs=2)
    with LLMEngine(model_config=tiny(tiny_directory, 64), cache_config=cache, scheduler_config=limits) as engine:
        assert engine.stats().num_blocks == 4
        assert len(engine.generate(ids(60), greedy(9)).token_ids) == 4
    with pytest.raises(ConfigError, match="max_model_len=65"):
        LLMEngine(model_config=tiny(tiny_directory, 65), cache_config=cache)
    enough = CacheConfig(block_size=16, kv_cache_memory_bytes=least)
    with LLMEngine(model_config=tiny(tiny_directory), cache_config=enough) as engine:
        assert len(engine.generate(ids(250), greedy(9)).token_ids) == 6
    with pytest.raises(ConfigError):
        LLMEngine(
            model_config=tiny(tiny_directory),
            cache_config=CacheConfig(block_size=16, kv_cache_memory_bytes=least - 1),
        )


def test_a_budget_without_room_for_a_block_is_refused(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes of at least"):
        LLMEngine(model_config=tiny(tiny_directory), cache_config=CacheConfig(kv_cache_memory_bytes=1))


def test_more_memory_than_the_machine_has_is_refused_before_it_is_asked_for(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"Use num_blocks of at most"):
        LLMEngine(model_config=tiny(tiny_directory), cache_config=CacheConfig(num_blocks=10**15))
    with pytest.raises(ConfigError, match=r"swap_space_bytes"):
        LLMEngine(
            model_config=tiny(tiny_directory),
            cache_config=CacheConfig(swap_space_bytes=10**18),
            scheduler_config=SchedulerConfig(preemption_mode="swap"),
        )


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization=0.5 needs a GPU, and the device is cpu"),
        ({"swap_space_bytes": 2**20}, "swap_space_bytes=1048576 has no effect with preemption_mode='recompute'"),
    ],
    ids=str,
)
def test_a_size_without_effect_is_refused_before_anything_is_loaded(cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine(model_config=ModelConfig(model="/nowhere", device="cpu"), cache_config=CacheConfig(**cache))


def test_a_small_model_does_not_take_all_of_the_default_budget(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler_config=SchedulerConfig(max_num_seqs=3))
    recorder_stats = engine.stats()
    assert recorder_stats.num_blocks == 3 * MAX_MODEL_LEN // 16
    assert held(engine) == 0
