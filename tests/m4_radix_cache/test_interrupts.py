"""Ctrl-C in the middle of a step, a flush, a close, an arrival: nobody is lost, no token is doubled or wrong.

The engine runs a small crowd in which everything happens: hits, duplicates, evictions, retractions, siblings, an abort,
several ends. One of its steps is interrupted before one of its lines, chosen at random; whoever called `step` goes on
as if nothing had been. Every line of the scheduler has its turn in `test_scheduler_interrupts.py`.
"""

from itertools import count
from types import ModuleType
from typing import Any

import pytest

from m1_single_request import (
    engine_core_base,
    llm_engine,
    request as request_module,
    request_updater,
    sampling_step,
    stop_checker,
)
from m3_paged_attention import output_processor, parallel_sampling, row_sampler
from m4_radix_cache import (
    LLMEngine,
    SamplingParams,
    engine_core,
    forward_batch,
    model_runner,
    recovery,
    retraction,
    sampling_batch_info,
    schedule_batch,
    scheduler as scheduler_module,
    scheduler_base,
)
from m4_radix_cache.mem_cache import allocator, base_prefix_cache, block_hash_cache, radix_cache, req_to_token_pool
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.m4_radix_cache.engines import (
    MakeEngine,
    cached_len,
    check_drained,
    check_flushed,
    failing_runner,
    greedy,
    run,
    setting,
)
from tests.support.interrupts import Crowd, check_told_once
from tests.testbed.interrupts import interrupted

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    scheduler_base,
    schedule_batch,
    retraction,
    recovery,
    base_prefix_cache,
    radix_cache,
    block_hash_cache,
    allocator,
    req_to_token_pool,
    request_updater,
    request_module,
    stop_checker,
]
ENGINE = [
    *SCHEDULER,
    engine_core,
    engine_core_base,
    parallel_sampling,
    model_runner,
    forward_batch,
    sampling_batch_info,
    row_sampler,
    sampling_step,
    output_processor,
]
COMMON = [41, 42, 43, 44]
ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "a": ([*COMMON, 31, 32, 33], greedy(7)),
    "family": (COMMON, greedy(6, n=3, temperature=1.0, seed=4)),
    "b": ([51, 52], greedy(3, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=2)),
    "gone": ([*COMMON, 61, 62, 63], greedy(9)),
    "c": ([*COMMON, 71], greedy(8, logprobs=1, prompt_logprobs=1)),
}
CASES = 8


def check_end(engine: LLMEngine) -> None:
    check_drained(engine)
    check_flushed(engine)


def forget_denials(engine: LLMEngine) -> None:
    """Of a retraction that was forced and interrupted."""
    scheduler: Any = engine.engine_core.scheduler
    scheduler.short.num_denials = 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, make_m1: Any, cache: str, modules: list[ModuleType]
) -> None:
    limits = setting(4, 16, tokens=34, page_size=2, cache=cache, conservativeness=0)
    crowd = Crowd(
        asked=ASKED,
        make=lambda: make_engine({"scheduler": ForcedRetraction}, **limits),
        check_end=check_end,
        after=forget_denials,
    )
    first = crowd.check_interrupts(make_m1(), modules, cases=CASES, seed=f"{cache}{len(modules)}")
    assert first.stats().num_retractions > 0 and (cache == "chunk" or first.stats().num_evicted_tokens > 0)


@pytest.mark.parametrize("at", ["before", "forward", "after"])
def test_an_interrupt_while_the_model_runs_keeps_the_cache(make_engine: MakeEngine, make_m1: Any, at: Any) -> None:
    runner = failing_runner(KeyboardInterrupt(), rid="r", position=8, at=at)
    engine = make_engine({"model_runner": runner}, **setting(3))
    prompt = [*COMMON, *range(60, 69)]
    engine.generate(prompt[:8], greedy(2))
    engine.add_request(prompt, greedy(4), request_id="r")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert cached_len(engine, prompt) == 8
    output = run(engine)["r"]
    assert output.token_ids == make_m1().generate(prompt, greedy(4)).token_ids
    assert output.metrics.cached_tokens == 8


def test_who_was_told_of_its_end_is_not_told_again_if_the_next_step_is_interrupted_at_once(
    make_engine: MakeEngine,
) -> None:
    check_told_once(lambda: make_engine(**setting(4)), [engine_core, engine_core_base], check_drained)


# --- outside a step ---------------------------------------------------------------------------------------------------

OUTSIDE: list[ModuleType] = [*SCHEDULER, engine_core, engine_core_base, llm_engine, parallel_sampling]


@pytest.mark.sample(1)
def test_a_flush_can_be_interrupted_anywhere(make_engine: MakeEngine, make_m1: Any, cache: str) -> None:
    """Then it is made again, or a request comes. Here and below every other line has its turn."""
    prompt = [*COMMON, 5, 6, 7]
    expected = make_m1().generate(prompt, greedy(4)).token_ids
    engine = make_engine(**setting(3, tokens=24, page_size=2, cache=cache))
    for line in count(1, 2):
        assert engine.generate(prompt, greedy(4)).token_ids == expected
        with interrupted(line, OUTSIDE) as interrupt:
            assert engine.flush_cache()
        if line % 4 == 1:
            check_flushed(engine)
        engine.add_request(prompt, greedy(4), request_id="r")
        assert run(engine)["r"].token_ids == expected, interrupt.where
        check_drained(engine)
        if interrupt.where is None:
            break
    assert line > 10


def test_an_arrival_can_be_interrupted_anywhere(make_engine: MakeEngine, make_m1: Any) -> None:
    """Whoever called `add_request` did not get an id: the request is given up, and the id is free again."""
    prompt = [*COMMON, 5, 6, 7]
    alone = make_m1()
    expected = alone.generate(prompt, greedy(4)).token_ids
    for line in count(1, 2):
        engine = make_engine(**setting(3, tokens=40, page_size=2))
        engine.add_request(prompt, greedy(4), request_id="first")
        engine.step()
        with interrupted(line, [module for module in OUTSIDE if module is not llm_engine]) as interrupt:
            engine.add_request(prompt, greedy(4, n=2), request_id="late", cache_salt="s")
        outputs = run(engine)
        assert outputs["first"].token_ids == expected
        if interrupt.where is None:
            break
        assert outputs.get("late") is None or outputs["late"].finish_reason in ("abort", "length"), interrupt.where
        engine.add_request(prompt, greedy(4), request_id="late")
        assert run(engine)["late"].token_ids == expected, interrupt.where
        engine.close()
    assert line > 10


def test_a_close_can_be_interrupted_anywhere_and_made_again(make_engine: MakeEngine) -> None:
    for line in count(1, 2):
        engine = make_engine(**setting(3, tokens=24, page_size=2))
        engine.generate([*COMMON, 5], greedy(3))
        engine.add_request([*COMMON, 6], greedy(9)), engine.step()
        with interrupted(line, OUTSIDE) as interrupt:
            engine.close()
        engine.close()
        stats = engine.stats()
        assert (stats.available_size, stats.evictable_size, stats.kv_tokens) == (24, 0, 0), interrupt.where
        if interrupt.where is None:
            break
    assert line > 10


def test_after_an_interrupted_close_an_engine_that_goes_on_ends_its_requests(make_engine: MakeEngine) -> None:
    """With their tokens, if the model is still there, or with an error."""
    for line in count(2, 2):
        engine = make_engine(**setting(3, tokens=24, page_size=2))
        engine.add_request([*COMMON, 6], greedy(5), request_id="r"), engine.step()
        with interrupted(line, OUTSIDE) as interrupt:
            engine.close()
        if interrupt.where is None or engine._closed:
            break
        assert run(engine)["r"].finish_reason in ("length", "error"), interrupt.where
        check_drained(engine)
    assert line > 10
