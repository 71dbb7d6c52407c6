"""One step of the engine: the loop that everything in this course hangs on.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

All seven stand in `step()`, in this order; `engine_core_base.py` holds what surrounds it. m3 moves preparing and
sampling into the model runner, next to the tensors. vLLM: `v1/engine/core.py`; SGLang: `Scheduler.event_loop_normal`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.model_runner import ModelRunner
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m1_single_request.sampling_step import SampledTokens, SamplingStep
from m1_single_request.scheduler import Scheduler, SchedulerOutput
from m1_single_request.tracer import Tracer


class EngineCore(EngineCoreBase):
    """Runs one request per step."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        sampling_step: SamplingStep,
        output_processor: OutputProcessor,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        super().__init__(
            input_processor=input_processor,
            holder=scheduler,
            kv_holder=model_runner,
            output_processor=output_processor,
            parts=parts,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampling_step = sampling_step

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of the request that changed.

        An exception in the model or the sampler ends the request of this step, and only it; a lost device
        (`EngineDeadError`) ends all, and the engine with them.
        """
        scheduler_output = self._schedule()  # 1 schedule
        inputs = self._attempt(self.model_runner.prepare_inputs, scheduler_output)  # 2 prepare inputs
        logits = self._attempt(self.model_runner.execute_model, inputs)  # 3 execute
        sampled = self._attempt(self._sample, logits) or {}  # 4 sample
        changed = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        outputs = self._make_outputs(changed)  # 6 make outputs
        self._release(changed)  # 7 release
        return outputs

    def _schedule(self) -> SchedulerOutput | None:
        """Ask the scheduler; note what runs, for the totals."""
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            self._record.request_ids = [scheduler_output.request_id]
            self._record.num_tokens = len(scheduler_output.token_ids)
            self._record.num_prompt_tokens = self._record.num_tokens if scheduler_output.is_prefill else 0
        self._record.lap("schedule")
        return scheduler_output

    def _sample(self, logits: Mapping[str, Tensor]) -> dict[str, SampledTokens]:
        """Sample a token for the request of this step; a row of logits that cannot be used ends it."""
        requests = [self.scheduler.requests[request_id] for request_id in logits]
        sampled, errors = self.sampling_step(requests, logits)
        self._fail_each(errors)
        self._record.lap("sample")
        return sampled

    def _release(self, changed: Iterable[Request]) -> None:
        """Free the KV of the requests that have ended."""
        for request in changed:
            if request.is_finished:
                self.model_runner.free_request_cache(request.request_id)
