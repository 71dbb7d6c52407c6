"""One step of the engine: m1's loop, with a batch in it.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

Compare it with m1's: the order is the same, and no stage knows how many requests there are. What goes through it has
changed: the scheduler answers with a batch, an executor runs it. vLLM: `v1/engine/core.py`; SGLang:
`Scheduler.event_loop_normal`.
"""

import time

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_step import SampledTokens, SamplingStep
from m1_single_request.tracer import Tracer
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.outputs import EngineStats
from m2_continuous_batching.scheduler import Scheduler


class EngineCore(EngineCoreBase):
    """Turns the crank."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        sampling_step: SamplingStep,
        output_processor: OutputProcessor,
        tracer: Tracer,
    ) -> None:
        super().__init__(
            input_processor=input_processor,
            unfinished=scheduler,
            kv_holder=executor,
            output_processor=output_processor,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.executor = executor
        self.sampling_step = sampling_step
        self._num_useful = self._num_padded = 0

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
        sampled: dict[str, SampledTokens] = {}
        if not scheduler_output.is_empty:
            try:
                input_batch = prepare_inputs_from_scheduler_output(scheduler_output)  # 2 prepare inputs
                logits = self.executor.execute_model_batch(input_batch)  # 3 execute
                times.append(time.perf_counter())
                requests = [self.scheduler.requests[request_id] for request_id in logits]
                sampled, errors = self.sampling_step(requests, logits)  # 4 sample
                self._fail_each(errors)
            except Exception as error:
                self._fail(scheduler_output.num_scheduled_tokens, error)
        times += [time.perf_counter()] * (4 - len(times))  # a step that ran nothing, or failed, has empty phases
        updated = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        changed = self._and_unreported(updated)
        outputs = self._make_outputs(changed)  # 6 make outputs
        self._release()  # 7 release
        prefilled = [new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in sampled]
        if sampled:
            usage = self.executor.usage()
            self._num_useful += usage.useful_tokens
            self._num_padded += usage.padded_tokens
        self._end_step(
            times,
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_prompt_tokens=sum(scheduler_output.num_scheduled_tokens[request_id] for request_id in prefilled),
            changed=changed,
        )
        return outputs

    def close(self) -> None:
        """Release the KV of all requests, and the slots it lay in."""
        super().close()
        kv_manager = self.scheduler.kv_manager
        for request_id in list(kv_manager.owned()):
            kv_manager.release(request_id)

    def stats(self) -> EngineStats:
        """Totals so far, what is held now, and the waste of both."""
        return EngineStats(
            **vars(super().stats()),
            useful_tokens=self._num_useful,
            padded_tokens=self._num_padded,
            kv_bytes_reserved=self.executor.usage().kv_bytes_reserved,
        )
