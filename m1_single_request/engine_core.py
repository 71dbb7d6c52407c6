"""One step of the engine: the loop that everything in this course hangs on.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

All seven stand in `step()`, in this order. m3 moves preparing and sampling into the model runner, next to the tensors.
vLLM: `v1/engine/core.py`; SGLang: `Scheduler.event_loop_normal`.
"""

import time

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.model_runner import ModelRunner
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_step import SampledTokens, SamplingStep
from m1_single_request.scheduler import Scheduler
from m1_single_request.tracer import Tracer


class EngineCore(EngineCoreBase):
    """Turns the crank."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        sampling_step: SamplingStep,
        output_processor: OutputProcessor,
        tracer: Tracer,
    ) -> None:
        super().__init__(
            input_processor=input_processor,
            unfinished=scheduler,
            kv_holder=model_runner,
            output_processor=output_processor,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampling_step = sampling_step

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of every request that changed. `{}` on an idle engine.

        An exception in the model or the sampler fails the request of this step, and only it; a lost device
        (`EngineDeadError`) fails all, and the engine with them.
        """
        if not self._begin_step():
            return {}
        times = [time.perf_counter()]
        scheduler_output = self.scheduler.schedule()  # 1 schedule
        times.append(time.perf_counter())
        sampled: dict[str, SampledTokens] = {}
        if scheduler_output is not None:
            try:
                inputs = self.model_runner.prepare_inputs(scheduler_output)  # 2 prepare inputs
                logits = self.model_runner.execute_model(inputs)  # 3 execute
                times.append(time.perf_counter())
                requests = [self.scheduler.requests[request_id] for request_id in logits]
                sampled, errors = self.sampling_step(requests, logits)  # 4 sample
                self._fail_each(errors)
            except Exception as error:
                self._fail([scheduler_output.request_id], error)
        times += [time.perf_counter()] * (4 - len(times))  # a step that ran nothing, or failed, has empty phases
        updated = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        changed = self._and_unreported(updated)
        outputs = self._make_outputs(changed)  # 6 make outputs
        self._release()  # 7 release
        num_tokens = len(scheduler_output.token_ids) if scheduler_output else 0
        prefilled = bool(sampled) and scheduler_output is not None and scheduler_output.is_prefill
        self._end_step(times, num_tokens=num_tokens, num_prompt_tokens=num_tokens if prefilled else 0, changed=changed)
        return outputs
