"""Ctrl-C in the middle of a step, a flush, a close, an arrival: nobody is lost, no token is doubled or wrong.

The engine runs a small crowd in which everything happens: hits, duplicates, evictions, retractions, siblings, an abort,
several ends. One of its steps is interrupted before one of its lines, chosen at random; whoever called `step` goes on
as if nothing had been. Every line of the scheduler has its turn in `test_scheduler_interrupts.py`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from types import FrameType, ModuleType
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
    unfinished,
)
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
ABORT_AT = 6
CASES = 8


def start(make_engine: MakeEngine, cache: str) -> LLMEngine:
    limits = setting(4, 16, tokens=34, page_size=2, cache=cache, conservativeness=0)
    engine = make_engine({"scheduler": ForcedRetraction}, **limits)
    for rid, (prompt, params) in ASKED.items():
        engine.add_request(prompt, params, request_id=rid)
    return engine


@contextmanager
def counted(modules: list[ModuleType]) -> Iterator[list[int]]:
    """How many lines of `modules` the block runs."""
    files, lines = {str(module.__file__) for module in modules}, [0]

    def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
        lines[0] += event == "line"
        return trace_lines

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: trace_lines if frame.f_code.co_filename in files else None)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of_each_step(engine: LLMEngine, modules: list[ModuleType]) -> list[int]:
    """Run to the end; how many lines each step has."""
    found: list[int] = []
    for _ in unfinished(engine):
        if len(found) == ABORT_AT:
            engine.abort_request("gone")
        with counted(modules) as lines:
            engine.step()
        found.append(lines[0])
    return found


def serve(engine: LLMEngine, step: int, line: int, modules: list[ModuleType]) -> tuple[dict[str, Any], Any]:
    """Run to the end, with one interrupt; the last outputs, and where it was."""
    last: dict[str, Any] = {}
    interrupt = None
    for number, _ in enumerate(unfinished(engine)):
        if number == ABORT_AT:
            engine.abort_request("gone")
        outputs: dict[str, Any] = {}
        if number == step:
            with interrupted(line, modules) as interrupt:
                outputs = engine.step()
            engine.engine_core.scheduler.short.num_denials = 0  # of a retraction that was interrupted
        else:
            outputs = engine.step()
            engine.engine_core.scheduler.check_invariants()
        assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported after its end"
        last |= outputs
    return last, interrupt


def check(engine: LLMEngine, last: dict[str, Any], expected: dict[str, list[tuple[int, ...]]]) -> None:
    assert last.keys() == ASKED.keys() and all(output.finished for output in last.values())
    for rid, output in last.items():
        assert output.error is None, (rid, output.error)
        for completion, whole in zip(output.outputs, expected[rid], strict=True):
            assert completion.token_ids == whole[: len(completion.token_ids)], rid
            assert completion.finish_reason == ("abort" if rid == "gone" else "length") or rid == "gone"
            assert completion.token_ids == whole or rid == "gone", rid
    assert sum(engine.stats().num_finished.values()) in (len(ASKED) - 1, len(ASKED)), "one may miss in the totals"
    again = engine.generate(*ASKED["family"])
    assert [completion.token_ids for completion in again.outputs] == expected["family"]
    check_drained(engine)
    check_flushed(engine)


@pytest.mark.parametrize("modules", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, make_m1: Any, cache: str, modules: list[ModuleType]
) -> None:
    alone = make_m1()
    expected: dict[str, list[tuple[int, ...]]] = {}
    for rid, (prompt, params) in ASKED.items():
        own = {name: getattr(params, name) for name in params.__dataclass_fields__} | {"n": 1}
        seeds = [params.seed if params.seed is None else params.seed + i for i in range(params.n)]
        expected[rid] = [alone.generate(prompt, SamplingParams(**own | {"seed": seed})).token_ids for seed in seeds]
    first = start(make_engine, cache)
    num_lines = lines_of_each_step(first, modules)
    assert first.stats().num_retractions > 0 and (cache == "chunk" or first.stats().num_evicted_tokens > 0)
    rng = Random(f"{cache}{len(modules)}")
    places = set()
    for _ in range(CASES):
        step = rng.randrange(len(num_lines))
        engine = start(make_engine, cache)
        last, interrupt = serve(engine, step, rng.randint(1, num_lines[step]), modules)
        places.add(interrupt.where)
        try:
            check(engine, last, expected)
        except Exception as error:
            raise AssertionError(f"after an interrupt of step {step} before {interrupt.where}: {error!r}") from error
        engine.close()
    assert None not in places and len(places) > CASES / 2


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
    for line in range(1, 16):
        engine = make_engine(**setting(4))
        engine.add_request([5], greedy(1, n=2), request_id="ends")
        engine.add_request([6], greedy(4), request_id="goes on")
        last: dict[str, Any] = {}
        while "ends" not in last or not last["ends"].finished:
            last |= engine.step()
        with interrupted(line, [engine_core, engine_core_base]) as interrupt:
            engine.step()
        assert interrupt.where is not None
        for _ in unfinished(engine):
            outputs = engine.step()
            assert "ends" not in outputs, f"after an interrupt before {interrupt.where}"
            last |= outputs
        assert len(last["goes on"].token_ids) == 4
        check_drained(engine)


# --- outside a step ---------------------------------------------------------------------------------------------------

OUTSIDE: list[ModuleType] = [*SCHEDULER, engine_core, engine_core_base, llm_engine, parallel_sampling]


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
