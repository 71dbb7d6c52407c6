"""Helpers of m3's engine tests: settings in a line, what blocks must hold, and parts that do what a test tells them."""

from typing import Any

from m3_paged_attention import CacheConfig, LLMEngine, SchedulerConfig
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.model_runner import ModelRunner
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.support.engines import (
    MAX_MODEL_LEN as MAX_MODEL_LEN,
    MakeEngine as MakeEngine,
    OnEvent as OnEvent,
    Recorder as Recorder,
    drain as drain,
    greedy as greedy,
    held as held,
    ids as ids,
    unfinished as unfinished,
)
from tests.support.victims import InTurn as InTurn

MODES = ("recompute", "swap")


def setting(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    *,
    blocks: int | None = None,
    block_size: int = 4,
    mode: Any = "recompute",
    **cache: Any,
) -> dict[str, Any]:
    """The keywords of an engine with these limits and so many blocks; without `blocks` there are always enough."""
    return {
        "scheduler_config": SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, preemption_mode=mode
        ),
        "cache_config": CacheConfig(block_size=block_size, num_blocks=blocks, **cache),
    }


def runner_of(engine: LLMEngine) -> ModelRunner:
    """What touches the tensors."""
    return engine.engine_core.executor.worker.model_runner


def check_step(engine: LLMEngine) -> None:
    """What must hold after every step that was not interrupted."""
    core = engine.engine_core
    scheduler, kv_manager, batch = core.scheduler, core.scheduler.kv_manager, runner_of(engine).input_batch
    scheduler.check_invariants()
    assert set(core.executor.held_request_ids()) <= scheduler.requests.keys()
    slots = set()
    for request in scheduler.running:
        block_ids = kv_manager.block_ids(request.request_id)
        done = request.sequence.num_computed_tokens
        slots |= {(block_ids[n // kv_manager.block_size], n % kv_manager.block_size) for n in range(done)}
        if request.is_sent:
            row = batch.block_tables[batch.states[request.request_id].table_row]
            assert row[: len(block_ids)].tolist() == block_ids and not row[len(block_ids) :].any()
    assert held(engine) == len(slots), "KV is held for exactly the computed tokens of the running requests"
    usage = kv_manager.usage()
    assert usage.num_used == len({block for owned in kv_manager.owned().values() for block in owned})
    assert engine.stats().num_free_blocks == usage.num_free == usage.num_blocks - usage.num_used


def check_drained(engine: LLMEngine) -> None:
    """What must hold when all work is done: nothing waits, runs, is held or remembered."""
    core, stats = engine.engine_core, engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)
    assert (stats.num_free_blocks, stats.num_shared_blocks, stats.kv_bytes_reserved) == (stats.num_blocks, 0, 0)
    assert not core.scheduler.requests
    check_memory(engine)


def check_memory(engine: LLMEngine) -> None:
    """No request owns a block, on the device or on the host, and the runner stores no state."""
    kv_manager = engine.engine_core.scheduler.kv_manager
    assert not kv_manager.owned() and not kv_manager.swapped()
    assert kv_manager.num_free == kv_manager.num_blocks
    kv_manager.check_invariants()
    assert engine.engine_core.executor.held_request_ids() == []


def run(engine: LLMEngine) -> dict[str, Any]:
    """Step until nothing is left, looking at the engine after every step; the last output of every request."""
    last = drain(engine, check_step)
    check_drained(engine)
    return last


def starts(decision: SchedulerOutput) -> dict[str, int]:
    """Where the new tokens of each request begin."""
    cached = decision.scheduled_cached_reqs
    full = [*decision.scheduled_new_reqs, *decision.scheduled_resumed_reqs]
    return {data.req_id: data.num_computed_tokens for data in full} | dict(
        zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


class CheckingExecutor(GPUExecutor):
    """Looks at every result: each scheduled request has a token or an error, and none has both."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute_model(scheduler_output)
        assert len(output.req_ids) == len(output.sampled_token_ids) == len(output.logprobs)
        got, failed = set(output.req_ids), output.errors.keys()
        assert got.isdisjoint(failed - of_the_prompt(output)) and got | failed == set(
            scheduler_output.num_scheduled_tokens
        )
        return output


def of_the_prompt(output: ModelRunnerOutput) -> set[str]:
    """Those whose token is sound, but not what was asked of their prompt."""
    return {rid for rid, error in output.errors.items() if "for the prompt" in str(error)}
