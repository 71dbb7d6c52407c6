"""Ctrl-C in the middle of a step: nobody is lost, no token is doubled or wrong, no block stays behind.

The engine runs a small crowd in which everything happens: prefill, decode, fork, copy on write, preemption, swap, an
abort, several ends. One of its steps is interrupted before one of its lines, chosen at random; whoever called `step`
goes on as if nothing had been.
"""

from types import ModuleType
from typing import Any

import pytest

from m1_single_request import engine_core_base, request as request_module, request_updater, sampling_step, stop_checker
from m3_paged_attention import (
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
from tests.m3_paged_attention.engines import MakeEngine, check_drained, greedy, setting
from tests.support.interrupts import Crowd, check_told_once

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
CASES = 30


@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, make_m1: Any, mode: str, modules: list[ModuleType]
) -> None:
    limits = setting(4, 12, blocks=9, block_size=2, mode=mode)
    crowd = Crowd(asked=ASKED, make=lambda: make_engine(**limits), check_end=check_drained)
    first = crowd.check_interrupts(make_m1(), modules, cases=CASES, seed=f"{mode}{len(modules)}")
    assert first.stats().num_preemptions > 0


def test_who_was_told_of_its_end_is_not_told_again_if_the_next_step_is_interrupted_at_once(
    make_engine: MakeEngine,
) -> None:
    check_told_once(lambda: make_engine(**setting(4)), [engine_core, engine_core_base], check_drained)
