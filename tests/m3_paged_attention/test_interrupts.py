"""Ctrl-C in the middle of a step: nobody is lost, no token is doubled or wrong, no block stays behind.

The engine runs a small crowd in which everything happens: prefill, decode, fork, copy on write, preemption, swap, an
abort, several ends. One of its steps is interrupted before one of its lines, chosen at random; whoever called `step`
goes on as if nothing had been.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType, ModuleType
from typing import Any

import pytest

from m1_single_request import engine_core_base, request as request_module, request_updater, sampling_step, stop_checker
from m3_paged_attention import (
    LLMEngine,
    SamplingParams,
    admission,
    block_pool,
    engine_core,
    input_batch,
    kv_cache_manager,
    model_runner,
    output_processor,
    parallel_sampling,
    request_queue,
    row_sampler,
    scheduler as scheduler_module,
    step_plan,
)
from tests.m3_paged_attention.engines import MakeEngine, check_drained, greedy, setting, unfinished
from tests.testbed.interrupts import interrupted

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    admission,
    step_plan,
    kv_cache_manager,
    block_pool,
    request_queue,
    request_updater,
    request_module,
    stop_checker,
]
ENGINE = [
    *SCHEDULER,
    engine_core,
    engine_core_base,
    parallel_sampling,
    input_batch,
    model_runner,
    row_sampler,
    sampling_step,
    output_processor,
]
ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "a": ([31, 32, 33], greedy(7)),
    "family": ([41, 42, 43, 44], greedy(6, n=3, temperature=1.0, seed=4)),
    "b": ([51, 52], greedy(3, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=2)),
    "gone": ([61, 62, 63], greedy(9)),
    "c": ([71], greedy(8, logprobs=1, prompt_logprobs=1)),
}
ABORT_AT = 6
LONGEST = 200
CASES = 30


def start(make_engine: MakeEngine, mode: str) -> LLMEngine:
    engine = make_engine(**setting(4, 12, blocks=9, block_size=2, mode=mode))
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
    for number in range(LONGEST):
        if not engine.has_unfinished_requests():
            return last, interrupt
        if number == ABORT_AT:
            engine.abort_request("gone")
        outputs: dict[str, Any] = {}
        if number == step:
            with interrupted(line, modules) as interrupt:
                outputs = engine.step()
        else:
            outputs = engine.step()
            engine.engine_core.scheduler.check_invariants()
        assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported after its end"
        last |= outputs
    raise AssertionError("the loop does not end")


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


@pytest.mark.parametrize("modules", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, make_m1: Any, mode: str, modules: list[ModuleType]
) -> None:
    alone = make_m1()
    expected: dict[str, list[tuple[int, ...]]] = {}
    for rid, (prompt, params) in ASKED.items():
        own = {name: getattr(params, name) for name in params.__dataclass_fields__} | {"n": 1}
        seeds = [params.seed if params.seed is None else params.seed + i for i in range(params.n)]
        expected[rid] = [alone.generate(prompt, SamplingParams(**own | {"seed": seed})).token_ids for seed in seeds]
    first = start(make_engine, mode)
    num_lines = lines_of_each_step(first, modules)
    assert first.stats().num_preemptions > 0
    rng = Random(f"{mode}{len(modules)}")
    places = set()
    for _ in range(CASES):
        step = rng.randrange(len(num_lines))
        engine = start(make_engine, mode)
        last, interrupt = serve(engine, step, rng.randint(1, num_lines[step]), modules)
        places.add(interrupt.where)
        try:
            check(engine, last, expected)
        except Exception as error:
            raise AssertionError(f"after an interrupt of step {step} before {interrupt.where}: {error!r}") from error
        engine.close()
    assert None not in places and len(places) > CASES / 2


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
