"""Helpers of m2's engine tests: what the slots hold, and parts that do what a test tells them.

A part of a test is put in with `make_engine({"model_runner": failing_runner(...)})`, as a reader of the course would do
it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from m2_continuous_batching import LLMEngine, SchedulerConfig
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.padded import PaddedExecution
from tests.support.engines import (
    MAX_MODEL_LEN as MAX_MODEL_LEN,
    OnEvent as OnEvent,
    Recorder as Recorder,
    drain as drain,
    greedy as greedy,
    held as held,
    unfinished as unfinished,
)

EXECUTIONS = ("padded", "per_request")


class MakeEngine(Protocol):
    """Builds an engine on the tiny model; `limits` are fields of `SchedulerConfig`."""

    def __call__(
        self,
        parts: Mapping[str, Any] | None = None,
        *,
        limits: Mapping[str, Any] | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        **configs: Any,
    ) -> LLMEngine: ...


def limits(max_num_seqs: int, max_num_batched_tokens: int | None = None, execution: Any = "padded") -> dict[str, Any]:
    """The keyword of an engine with these limits."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, execution=execution
    )
    return {"scheduler_config": config}


def check_step(engine: LLMEngine) -> None:
    """What must hold after every step that was not interrupted."""
    core = engine.engine_core
    scheduler, executor = core.scheduler, core.executor
    scheduler.check_invariants()
    computed = {request.request_id: request.sequence.num_computed_tokens for request in scheduler.running}
    assert sum(computed.values()) == held(engine), "KV is held for exactly the computed tokens of the running requests"
    assert set(executor.worker.model_runner.execution.lengths()) <= computed.keys()
    execution = executor.worker.model_runner.execution
    if isinstance(execution, PaddedExecution):
        owned = scheduler.kv_manager.owned()
        assert all(owned[request_id] == [slot] for request_id, slot in execution.slots.items())


def check_drained(engine: LLMEngine) -> None:
    """What must hold when all work is done: nothing waits, runs or is held, and no slot holds a number."""
    core = engine.engine_core
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)
    assert not core.scheduler.requests and not core.scheduler.kv_manager.owned()
    assert core.executor.worker.model_runner.execution.lengths() == {}
    execution = core.executor.worker.model_runner.execution
    if isinstance(execution, PaddedExecution):
        assert not execution.slots and not any(execution.lens)


def run(engine: LLMEngine) -> dict[str, Any]:
    """Step until nothing is left, looking at the engine after every step; the last output of every request."""
    last: dict[str, Any] = {}
    for _ in unfinished(engine):
        last |= engine.step()
        check_step(engine)
    check_drained(engine)
    return last


def failing_runner(error: BaseException, *, rid: str, position: int, after_forward: bool = False) -> type[ModelRunner]:
    """A runner that raises once: in the batch in which `rid` runs at `position`, before its forward or after it."""
    left = [error]

    class FailingRunner(ModelRunner):
        def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
            rows = dict(zip(input_batch.req_ids, input_batch.start_positions, strict=True))
            fails = left and rows.get(rid) == position
            if fails and not after_forward:
                raise left.pop()
            logits = super().execute_model_batch(input_batch)
            if fails:
                raise left.pop()
            return logits

    return FailingRunner
