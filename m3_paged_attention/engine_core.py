"""One step of the engine, after m3 moved the tensors' work to where the tensors are.

    m1, m2    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release
    m3        schedule -> execute ( prepare -> forward -> sample ) -> update -> make outputs -> release

What comes back from the executor are tokens. They fit into a message, logits do not; from here on the engine core could
stand in another process than the model. Requests with `n > 1` are several inside and one outside. vLLM:
`v1/engine/core.py`; SGLang: `Scheduler.event_loop_normal`.
"""

import time

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.tracer import Tracer
from m3_paged_attention.events import KVUsage
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import EngineStats, ModelRunnerOutput, checked
from m3_paged_attention.parallel_sampling import RequestFamilies
from m3_paged_attention.scheduler import Scheduler


class EngineCore(EngineCoreBase):
    """Turns the crank."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        tracer: Tracer,
    ) -> None:
        self.families = RequestFamilies(scheduler=scheduler, tracer=tracer)
        super().__init__(
            input_processor=input_processor,
            unfinished=self.families,
            kv_holder=KVView(scheduler, executor, kv_bytes_per_token),
            output_processor=output_processor,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of every request that changed. `{}` on an idle engine.

        An exception in the model fails the requests of this step, and only them; a row of logits that cannot be used
        fails its own request; a lost device (`EngineDeadError`) fails all, and the engine with them.
        """
        if not self._begin_step():
            return {}
        times = [time.perf_counter()]
        scheduler_output = self.scheduler.schedule()  # 1 schedule
        times.append(time.perf_counter())
        output: ModelRunnerOutput | None = None
        if not scheduler_output.is_empty:
            try:
                said = self.executor.execute_model(scheduler_output)  # 2 execute
                output = checked(said, dict.fromkeys(scheduler_output.num_scheduled_tokens, 1))
                self._fail_each(output.errors)
            except Exception as error:
                self._fail(scheduler_output.num_scheduled_tokens, error)
        executed = time.perf_counter()
        times += [executed - (output.sample_seconds if output else 0.0), executed]
        updated = self.scheduler.update_from_output(scheduler_output, output)  # 3 update
        if self.tracer and output is not None:
            self._trace_usage()
        changed = self._and_unreported(self.families.reported(updated))
        outputs = self._make_outputs(changed)  # 4 make outputs
        self._release()  # 5 release
        prompts = [new.req_id for new in scheduler_output.scheduled_new_reqs if output and not new.num_computed_tokens]
        self._end_step(
            times,
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_prompt_tokens=sum(scheduler_output.num_scheduled_tokens[request_id] for request_id in prompts),
            changed=changed,
        )
        return outputs

    def close(self) -> None:
        """Release the blocks of all requests, then the KV memory and the model: the engine object may live on."""
        super().close()
        self.executor.shutdown()

    def is_unfinished(self, request_id: str) -> bool:
        """As m1's. If a parent's arrival was interrupted, only its family knows it, until its children have ended."""
        return super().is_unfinished(request_id) or self.families.is_unfinished(request_id)

    def stats(self) -> EngineStats:
        """Totals so far, and the state of the blocks."""
        kv_manager = self.scheduler.kv_manager
        usage, block_bytes = kv_manager.usage(), kv_manager.block_size * self._kv_holder.kv_bytes_per_token
        totals, uncounted = vars(super().stats()), [r for rid, r in self._open.items() if rid not in self._counted]
        totals["num_output_tokens"] = self._num_output_tokens + sum(r.num_output_tokens for r in uncounted)
        return EngineStats(
            **totals,
            num_blocks=usage.num_blocks,
            num_free_blocks=usage.num_free,
            num_shared_blocks=usage.num_shared,
            kv_bytes_reserved=usage.num_used * block_bytes,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _trace_usage(self) -> None:
        if self.tracer:
            kv_manager = self.scheduler.kv_manager
            usage = kv_manager.usage()
            self.tracer.emit(
                KVUsage(
                    num_used=usage.num_used,
                    num_free=usage.num_free,
                    num_shared=usage.num_shared,
                    num_host_used=sum(map(len, kv_manager.swapped().values())),
                    block_size=kv_manager.block_size,
                    tokens_held=self._kv_holder.num_kv_tokens(),
                )
            )


class KVView:
    """What is held, seen from above: the scheduler knows the blocks, the runner its records of requests."""

    def __init__(self, scheduler: Scheduler, executor: GPUExecutor, kv_bytes_per_token: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.kv_bytes_per_token = kv_bytes_per_token

    def free_request_cache(self, request_id: str) -> None:
        """Forget what the runner knows of a request, and release its blocks."""
        self.executor.free_request(request_id)
        self.scheduler.kv_manager.release(request_id)

    def clear_kv_caches(self) -> None:
        """The same for all requests."""
        for request_id in self.held_request_ids():
            self.free_request_cache(request_id)

    def held_request_ids(self) -> list[str]:
        """The requests that hold a record or blocks."""
        kv_manager = self.scheduler.kv_manager
        return list(dict.fromkeys([*self.executor.held_request_ids(), *kv_manager.owned(), *kv_manager.swapped()]))

    def num_kv_tokens(self) -> int:
        """Slots of the device's blocks that hold a token's KV; a shared one counts once."""
        lengths = {r.request_id: r.sequence.num_computed_tokens for r in self.scheduler.running}
        return self.scheduler.kv_manager.num_tokens_held(lengths)
