"""Engine core: one step. Preparing the inputs and sampling have moved to the model runner.

    m1, m2    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release
    m3        schedule -> execute ( prepare -> forward -> sample ) -> update -> make outputs -> release

In m3 the update frees the KV blocks, and the release removes the runner's state of the requests that ended. The
executor returns tokens. They fit into a message, logits do not; from here on the engine core could run in another
process than the model. A request with `n > 1` is several requests for the scheduler and one for the caller. vLLM:
`v1/engine/core.py`; SGLang: `Scheduler.event_loop_normal`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from m1_single_request.engine_core import EngineCoreBase, StepRecord
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m1_single_request.tracer import Tracer
from m3_paged_attention.executor import GPUExecutor, accepted, checked
from m3_paged_attention.kv_events import BlocksUsed
from m3_paged_attention.outputs import EngineStats, ModelRunnerOutput
from m3_paged_attention.parallel_sampling import RequestFamilies
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput


class EngineCore(EngineCoreBase):
    """Engine core that samples in the model runner.

    `stats` adds the blocks and the preemptions (`_add_to_totals` counts them); `close` also shuts the executor down.
    """

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        self.families = RequestFamilies(scheduler=scheduler, tracer=tracer)
        super().__init__(input_processor, scheduler, output_processor, parts, tracer)
        self._intake = self.families
        self.scheduler = scheduler
        self.executor = executor
        self.kv_bytes_per_token = kv_bytes_per_token
        self._num_preemptions = 0  # up to the last finished step

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of every request that changed.

        An exception in the model ends only the requests of this step (`_run_or_fail`, m1). A row of logits that cannot
        be used ends only its own request. A lost device (`EngineDeadError`) ends all requests and the engine.
        """
        scheduler_output = self._schedule()  # 1 schedule
        output = self._run_or_fail("execute", self._execute, scheduler_output)  # 2 execute
        changed = self.scheduler.update_from_output(scheduler_output, output)  # 3 update
        if output is not None:
            self.tracer.emit(BlocksUsed.of, self.scheduler.kv_manager, self.num_kv_tokens)
        outputs = self._make_outputs(self.families.reported(changed))  # 4 make outputs
        self._release(changed)  # 5 release
        return outputs

    def clear_kv_caches(self) -> None:
        """Remove the runner's state of all requests; the scheduler has freed their blocks."""
        for request_id in self.executor.held_request_ids():
            self.executor.free_request(request_id)

    def num_kv_tokens(self) -> int:
        """Return the number of slots in the device's blocks that hold the KV of a token; a shared slot counts once."""
        lengths = {r.request_id: r.sequence.num_computed_tokens for r in self.scheduler.running}
        return self.scheduler.kv_manager.num_tokens_held(lengths)

    def close(self) -> None:
        """End all requests, then free the KV memory and the model, even while the caller keeps the engine object."""
        try:
            super().close()
        finally:
            self.executor.shutdown()

    def stats(self) -> EngineStats:
        """Return the totals so far, and the state of the blocks."""
        kv_manager = self.scheduler.kv_manager
        usage, block_bytes = kv_manager.usage(), kv_manager.block_size * self.kv_bytes_per_token
        return EngineStats(
            **vars(super().stats()),
            num_blocks=usage.num_blocks,
            num_free_blocks=usage.num_free,
            num_shared_blocks=usage.num_shared,
            kv_bytes_reserved=usage.num_used * block_bytes,
            num_preemptions=self._num_preemptions,
        )

    def _schedule(self) -> SchedulerOutput | None:
        """Schedule the step, and record its requests and tokens for the totals."""
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            counts = scheduler_output.num_scheduled_tokens
            prompts = [new for new in scheduler_output.scheduled_new_reqs if not new.num_computed_tokens]
            self._record.request_ids = counts
            self._record.num_tokens = scheduler_output.total_num_scheduled_tokens
            self._record.num_prompt_tokens = sum(counts[new.req_id] for new in prompts)
        self._record.lap("schedule")
        return scheduler_output

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the scheduler's output. A request with an error in place of a token ends with this error."""
        output = self.executor.execute_model(scheduler_output)
        self._record.lap("execute")
        output = checked(output, dict.fromkeys(scheduler_output.num_scheduled_tokens, 1))
        return accepted(output, self._record, self._fail)

    def _add_to_totals(self, record: StepRecord) -> None:
        super()._add_to_totals(record)
        self._num_preemptions = self.scheduler.num_preemptions

    def _release(self, changed: Iterable[Request]) -> None:
        """Remove the runner's state of finished requests; the update has freed their blocks."""
        for request in changed:
            if request.is_finished:
                self.executor.free_request(request.request_id)
