"""Ctrl-C before any line of a step: nobody is lost, no token is doubled or wrong, and the loop comes to its end.

The step is one in which everything happens at once, on the fake model. It is interrupted before its first line, then
before its second, and so on; what comes afterwards must not show it.
"""

from collections.abc import Callable
from itertools import count
from types import ModuleType
from typing import Any

import pytest

from m1_single_request import (
    engine_core_base,
    output_processor,
    request as request_module,
    request_updater,
    sampling_step,
)
from m2_continuous_batching import (
    LLMEngine,
    SamplingParams,
    SchedulerConfig,
    engine_core,
    kv_manager,
    request_queue,
    scheduler as scheduler_module,
    step_plan,
)
from tests.m2_continuous_batching.engines import MakeEngine, greedy, limits, run
from tests.testbed.bed import SchedulerBed, make_bed
from tests.testbed.fakes import FakeRunner, answer, fake_model_loader
from tests.testbed.interrupts import Interrupt, interrupted

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    step_plan,
    kv_manager,
    request_queue,
    request_updater,
    request_module,
]
ENGINE = [*SCHEDULER, engine_core, engine_core_base, sampling_step, output_processor]
MANY_STEPS = 100


def before_every_line(modules: list[ModuleType], make: Callable[[], Any], act: Callable[[Any], Any]) -> Any:
    """Yields `(what was made, the interrupt)` once for each line of `modules` that `act` runs."""
    for line in count(1):
        made = make()
        with interrupted(line, modules) as interrupt:
            act(made)
        if interrupt.where is None:
            assert line > 1, "no line was seen"
            return
        yield made, interrupt


# --- the scheduler ----------------------------------------------------------------------------------------------------


def crowded_bed() -> SchedulerBed:
    """A bed before a step in which everything happens.

    r0 and r1 decode and reach their ends, r2 decodes and is aborted, r3 decodes and was left out; r5 waits and will be
    admitted, r6 waits and is aborted, r7 waits and is too long for what is left. (r4 has ended.)
    """
    bed = make_bed(max_num_seqs=6, max_num_batched_tokens=8, checked=False, trace=True)
    for max_tokens in (3, 3, 9, 9):
        bed.add(2, max_tokens)
    bed.step()
    bed.add(5, max_tokens=1)
    bed.step()
    bed.add(3, max_tokens=2), bed.add(3), bed.add(7)
    assert bed.events("left_out")[-1].rids == ("r3",)
    bed.abort("r2", "r6")
    return bed


def check_the_rest(bed: SchedulerBed, *aborted: str) -> None:
    """Drain a bed: everybody ends with the right tokens, nothing is left, and who comes later is served as ever."""
    bed.step()  # the invariants hold again after one whole step
    bed.drain(limit=MANY_STEPS)
    for rid, request in bed.requests.items():
        assert request.is_finished and request.finish_reason is not None
        assert request.finish_reason.reason == ("abort" if rid in aborted else "length"), rid
        whole = answer(request.prompt_token_ids, request.sampling_params.max_tokens)
        assert bed.said(rid) == whole[: len(bed.said(rid))], rid
        assert rid in aborted or bed.said(rid) == whole, rid
    assert not bed.waiting() and not bed.running()
    later = bed.add(2)
    assert bed.drain()[later] == "length"


def check_each(
    make: Callable[[], SchedulerBed], act: Callable[[SchedulerBed], Any], aborted: tuple[str, ...], again: bool = False
) -> None:
    """Interrupt `act` everywhere; `again`: whoever was interrupted repeats it."""
    for bed, interrupt in before_every_line(SCHEDULER, make, act):
        try:
            if again:
                act(bed)
            check_the_rest(bed, *aborted)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


def test_schedule_can_be_interrupted_anywhere() -> None:
    check_each(crowded_bed, lambda bed: bed.scheduler.schedule(), aborted=("r2", "r6"))


def test_update_from_output_can_be_interrupted_anywhere() -> None:
    def update(bed: SchedulerBed) -> None:
        bed.scheduler.update_from_output(*bed.decision)  # type: ignore[attr-defined]

    def executed_bed() -> SchedulerBed:
        bed = crowded_bed()
        output = bed.scheduler.schedule()
        bed.decision = (output, bed.execute(output))  # type: ignore[attr-defined]
        return bed

    check_each(executed_bed, update, aborted=("r2", "r6"))


def test_an_abort_can_be_interrupted_anywhere_and_made_again() -> None:
    victims = ("r0", "r5", "r7")
    check_each(crowded_bed, lambda bed: bed.abort(*victims), aborted=("r2", "r6", *victims), again=True)


def test_an_arrival_can_be_interrupted_anywhere_and_given_up() -> None:
    """The face gives up whatever it could not hand over."""
    for bed, interrupt in before_every_line(SCHEDULER, crowded_bed, lambda bed: bed.add(2, request_id="newcomer")):
        bed.abort("newcomer")
        try:
            check_the_rest(bed, "r2", "r6")
            assert "newcomer" not in bed.requests or bed.requests["newcomer"].is_finished
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


# --- the engine core --------------------------------------------------------------------------------------------------

PROMPTS = {"a": [1, 2], "b": [3, 4, 5], "c": [6], "d": [7, 8, 9, 10], "e": [11, 12]}
LAST_LINE = f"EngineCore.step, line {max(n for *_, n in engine_core.EngineCore.step.__code__.co_lines() if n)}"
MAX_TOKENS = {"a": 2, "b": 5, "c": 2, "d": 3, "e": 1}


def busy_engine() -> LLMEngine:
    """An engine before a step in which a and c end and the next two can take their slots."""
    parts = {"model_loader": fake_model_loader(), "model_runner": FakeRunner}
    engine = LLMEngine(parts=parts, scheduler_config=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=6))
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS[rid]), request_id=rid)
    engine.engine_core.step()
    return engine


def check_the_engine(engine: LLMEngine, interrupt: Interrupt) -> None:
    """Step the engine to its end: all that it reports is right, and it holds nothing."""
    core, ended = engine.engine_core, {}
    for _ in range(MANY_STEPS):
        if not core.has_unfinished_requests():
            break
        for rid, output in core.step().items():
            assert rid not in ended, f"{rid} is reported after its end"
            assert output.error is None, (rid, output.error)
            whole = answer(PROMPTS[rid], MAX_TOKENS[rid])
            assert output.token_ids == whole[: len(output.token_ids)], rid
            if output.finished:
                ended[rid] = output.finish_reason
                assert output.token_ids == whole, rid
    assert not core.has_unfinished_requests(), "the loop does not end"
    assert set(ended.values()) == {"length"}
    if "EngineCoreBase._end_step" not in interrupt.inside and interrupt.where != LAST_LINE:
        assert ended.keys() == PROMPTS.keys(), "an end was lost before its step was over"
    core.step()  # on an idle engine: releases what an interrupted step has left
    core.scheduler.check_invariants()
    assert not core.scheduler.requests and not core.scheduler.waiting and not core.scheduler.kv_manager.owned()
    assert core.executor.held_request_ids() == []
    engine.close()


@pytest.mark.exhaustive
def test_a_step_of_the_engine_can_be_interrupted_anywhere() -> None:
    for engine, interrupt in before_every_line(ENGINE, busy_engine, lambda engine: engine.engine_core.step()):
        try:
            check_the_engine(engine, interrupt)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


@pytest.mark.exhaustive
def test_who_gets_the_slot_of_an_interrupted_step_keeps_it(make_engine: MakeEngine, execution: str) -> None:
    """The scheduler may have let a slot go, the runner not yet, when the next step hands it to the next in line."""
    prompt = [5, 6, 7, 8, 9, 10]

    def make() -> LLMEngine:
        engine = make_engine(**limits(1, execution=execution))
        engine.add_request([1, 2, 3], greedy(1), request_id="ends")
        engine.add_request(prompt, greedy(3), request_id="next")
        return engine

    expected = make_engine().generate(prompt, greedy(3)).token_ids
    modules = [scheduler_module, kv_manager, engine_core_base, output_processor]
    for engine, interrupt in before_every_line(modules, make, lambda engine: engine.step()):
        outputs = run(engine)
        assert outputs["next"].token_ids == expected, f"after an interrupt before {interrupt.where}"
        engine.close()
