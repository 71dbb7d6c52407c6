"""When something breaks while blocks are on their way, in a family of requests, or at the end of an engine.

All that every milestone with batches promises about failures is tested in `tests/engine_contract`.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from m1_single_request.errors import PartError
from m1_single_request.request import Request
from m3_paged_attention import EngineDeadError, ForwardError
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.output_processor import OutputProcessor
from tests.engine_contract.crowd import PROMPTS, submit
from tests.engine_contract.variants import M3, MOMENTS, FailingRunner, Moment
from tests.m3_paged_attention.engines import MakeEngine, check_drained, greedy, run, runner_of, setting
from tests.support.engines import check_begun
from tests.support.victims import INVALID_VICTIMS, check_some_failed, failing_when_somebody_leaves

BOOM = RuntimeError("the forward broke")


# --- what takes the whole step along ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MOMENTS)
def test_whoever_was_preempted_in_a_step_that_failed_is_computed_again(
    make_engine: MakeEngine, make_m1: Any, mode: str, at: Moment
) -> None:
    """Its blocks should have moved to the host in that step; whether they did is unknown."""

    failing = failing_when_somebody_leaves(lambda: engine.stats().num_preemptions, BOOM, at)
    engine = make_engine({"executor": failing}, **setting(4, blocks=7, block_size=2, mode=mode))
    for n in range(4):
        engine.add_request([5 + n, 9], greedy(9), request_id=str(n))
    check_some_failed(run(engine), make_m1())


@pytest.mark.parametrize("move", ["copy_blocks", "swap_out", "swap_in"])
def test_a_move_of_blocks_that_breaks_fails_its_step_and_no_more(
    make_engine: MakeEngine, make_m1: Any, move: str
) -> None:
    engine = make_engine(**setting(4, blocks=8, block_size=2, mode="swap"))
    kv = runner_of(engine).kv
    real = getattr(kv, move)

    def broken(pairs: Any) -> None:
        if pairs:
            setattr(kv, move, real)
            raise BOOM
        real(pairs)

    setattr(kv, move, broken)
    params = greedy(8, n=2, temperature=1.0, seed=4)
    for n in range(3):
        engine.add_request([5 + n, 7, 8, 9], params, request_id=str(n))
    outputs = run(engine)
    assert getattr(kv, move) == real, "it was needed"
    alone, ends = make_m1(), Counter[str]()
    for n in range(3):
        for index, completion in enumerate(outputs[str(n)].outputs):
            ends[completion.finish_reason] += 1
            check_begun(completion, alone.generate([5 + n, 7, 8, 9], greedy(8, temperature=1.0, seed=4 + index)))
    assert ends["length"] > 0 and ends.keys() <= {"length", "error"}


# --- one child of several ---------------------------------------------------------------------------------------------


def test_a_child_that_fails_ends_alone_and_its_parent_reports_it(make_engine: MakeEngine, make_m1: Any) -> None:
    """The blocks of the prompt are shared, so only a block of its own can be spoiled."""
    engine = make_engine(**setting(4, block_size=2))
    engine.add_request([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    for _ in range(4):
        engine.step()
    with torch.inference_mode():
        block_id = engine.engine_core.scheduler.kv_manager.block_ids("p/1")[-1]
        runner_of(engine).kv.layer(0).key_cache[block_id, 0] = torch.nan
    output = run(engine)["p"]
    alone = make_m1()
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    for index, completion in enumerate(output.outputs):
        check_begun(completion, alone.generate([5, 6, 7], greedy(6, temperature=1.0, seed=5 + index)))
    assert isinstance(output.error, ForwardError) and "'p/1'" in str(output.error)


def test_a_family_whose_step_fails_reports_what_each_had(make_engine: MakeEngine, make_m1: Any) -> None:
    engine = make_engine(FailingRunner(M3, BOOM, rid="p/1", position=4, at="forward").parts, **setting(4, block_size=2))
    output = engine.generate([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert output.error is BOOM
    assert [len(completion.token_ids) for completion in output.outputs] == [3, 2, 2]
    check_drained(engine)


def test_a_parent_whose_output_cannot_be_made_ends_with_the_error_and_all_its_children(make_engine: MakeEngine) -> None:
    class Refuses(OutputProcessor):
        def visible_text(self, request: Request) -> str:
            if request.request_id == "p/1" and request.sequence.get_output_len() == 2:
                raise BOOM
            return super().visible_text(request)

    engine = make_engine({"output_processor": Refuses}, **setting(4))
    engine.add_request([5, 6, 7], greedy(6, n=3), request_id="p")
    engine.add_request([5, 6], greedy(6), request_id="other")
    outputs = run(engine)
    assert outputs["p"].error is BOOM and outputs["p"].finish_reason == "error"
    assert outputs["other"].finish_reason == "length"
    assert engine.stats().num_finished == {"error": 1, "length": 1}


def test_a_lost_device_fails_a_family_that_runs_and_one_that_waits(make_engine: MakeEngine) -> None:
    """Each ends once, with the error, and with what it had."""
    lost = EngineDeadError("the device is gone")
    engine = make_engine(FailingRunner(M3, lost, rid="p/0", position=3, at="forward").parts, **setting(2))
    for rid in ("p", "q"):
        engine.add_request([5, 6, 7], greedy(9, n=2, temperature=1.0, seed=3), request_id=rid)
    engine.step()
    outputs = engine.step()
    assert outputs.keys() == {"p", "q"}
    assert all(isinstance(output.error, EngineDeadError) for output in outputs.values())
    assert [len(completion.token_ids) for rid in "pq" for completion in outputs[rid].outputs] == [1, 0, 0, 0]
    check_drained(engine)
    assert engine.stats().num_finished == {"error": 2}


# --- a part that breaks the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seats", "blocks", "num_valid"), [(2, 8, 0), (3, 9, 1)])
@pytest.mark.parametrize("choice", INVALID_VICTIMS)
def test_a_policy_that_chooses_no_running_request_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, make_m1: Any, mode: str, choice: str, seats: int, blocks: int, num_valid: int
) -> None:
    """A first victim may wait already, perhaps with its blocks on the way to the host."""
    alone, left = make_m1(), [1] * num_valid

    class Invalid:
        def choose_victim(self, running: Any) -> Any:
            return running[0] if left and left.pop() else INVALID_VICTIMS[choice](running)

    engine = make_engine({"preemption": Invalid}, **setting(seats, blocks=blocks, block_size=2, mode=mode))
    for rid in "abc":
        engine.add_request(PROMPTS[rid], greedy(12), request_id=rid)
    for rid, output in run(engine).items():
        assert isinstance(output.error, PartError) and "the part 'preemption' (Invalid)" in str(output.error)
        check_begun(output, alone.generate(PROMPTS[rid], greedy(12)))
    assert not left
    assert engine.generate(PROMPTS["a"], greedy(12)).token_ids == alone.generate(PROMPTS["a"], greedy(12)).token_ids
    check_drained(engine)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_preemptions_of_a_step_that_was_stopped_do_not_count(make_engine: MakeEngine) -> None:
    class Stopped(GPUExecutor):
        def execute_model(self, *args: Any) -> Any:
            if engine.engine_core.scheduler.num_preemptions:
                raise KeyboardInterrupt
            return super().execute_model(*args)

    engine = make_engine({"executor": Stopped}, **setting(3, block_size=2, blocks=7))
    submit(engine)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.engine_core.scheduler.num_preemptions == 1 and engine.stats().num_preemptions == 0
