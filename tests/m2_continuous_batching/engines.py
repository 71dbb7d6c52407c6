"""Helpers of m2's engine tests: limits in a line, and what must hold of slots and memory."""

from typing import Any

from torch import Tensor

from m2_continuous_batching import LLMEngine, SchedulerConfig
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.padded import PaddedExecution
from tests.support.engines import (
    MAX_MODEL_LEN as MAX_MODEL_LEN,
    MakeEngine as MakeEngine,
    Recorder as Recorder,
    drain,
    greedy as greedy,
    held as held,
    unfinished as unfinished,
)

EXECUTIONS = ("padded", "per_request")


def limits(max_num_seqs: int, max_num_batched_tokens: int | None = None, execution: Any = "padded") -> dict[str, Any]:
    """The keyword of an engine with these limits."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, execution=execution
    )
    return {"scheduler_config": config}


def check_step(engine: LLMEngine) -> None:
    """What must hold after every step that was not interrupted."""
    core = engine.engine_core
    scheduler, execution = core.scheduler, core.executor.worker.model_runner.execution
    scheduler.check_invariants()
    computed = {request.request_id: request.sequence.num_computed_tokens for request in scheduler.running}
    assert sum(computed.values()) == held(engine), "KV is held for exactly the computed tokens of the running requests"
    assert set(execution.lengths()) <= computed.keys()
    if isinstance(execution, PaddedExecution):
        owned = scheduler.kv_manager.owned()
        assert all(owned[request_id] == [slot] for request_id, slot in execution.slots.items())


def check_drained(engine: LLMEngine) -> None:
    """What must hold when all work is done: nothing waits, runs or is held, and no slot has an owner."""
    core, stats = engine.engine_core, engine.stats()
    execution = core.executor.worker.model_runner.execution
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)
    assert not core.scheduler.requests and not core.scheduler.kv_manager.owned()
    assert execution.lengths() == {}
    if isinstance(execution, PaddedExecution):
        assert not execution.slots and not any(execution.lens)


def run(engine: LLMEngine) -> dict[str, Any]:
    """Step until nothing is left, looking at the engine after every step; the last output of every request."""
    last = drain(engine, check_step)
    check_drained(engine)
    return last


def failing_runner(error: BaseException, *, rid: str, position: int) -> type[ModelRunner]:
    """A runner that raises once: in the batch in which `rid` runs at `position`."""
    left = [error]

    class FailingRunner(ModelRunner):
        def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
            rows = dict(zip(input_batch.req_ids, input_batch.start_positions, strict=True))
            if left and rows.get(rid) == position:
                raise left.pop()
            return super().execute_model_batch(input_batch)

    return FailingRunner
