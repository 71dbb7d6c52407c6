"""One step of the engine: m1's loop, with a batch in it.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

Compare it with m1's: the order is the same, and no stage knows how many requests there are. What goes through it has
changed: the scheduler answers with a batch, an executor runs it. vLLM: `v1/engine/core.py`; SGLang:
`Scheduler.event_loop_normal`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from m1_single_request.engine_core import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m1_single_request.sampler import SampledTokens
from m1_single_request.tracer import Tracer
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.outputs import EngineStats
from m2_continuous_batching.sampling_step import SamplingStep
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.scheduler_output import SchedulerOutput


class EngineCore(EngineCoreBase):
    """Runs a batch of requests per step. `stats` adds the padding and the memory reserved."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        sampling_step: SamplingStep,
        output_processor: OutputProcessor,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        super().__init__(
            input_processor=input_processor,
            queues=scheduler,
            output_processor=output_processor,
            parts=parts,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.executor = executor
        self.sampling_step = sampling_step
        self.kv_bytes_per_token = executor.kv_bytes_per_token
        self._num_useful = self._num_padded = 0

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of every request that changed.

        An exception in the model or the sampler ends the requests of this step, and only them; a row of logits that
        cannot be used ends its own request; a lost device (`EngineDeadError`) ends all, and the engine with them.
        """
        scheduler_output = self._schedule()  # 1 schedule
        input_batch = self._attempt(prepare_inputs_from_scheduler_output, scheduler_output)  # 2 prepare inputs
        logits = self._attempt(self.executor.execute_model_batch, input_batch)  # 3 execute
        sampled = self._attempt(self._sample, logits) or {}  # 4 sample
        changed = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        outputs = self._make_outputs(changed)  # 6 make outputs
        self._release(changed)  # 7 release
        return outputs

    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.executor.clear_kv_caches()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""
        return self.executor.num_kv_tokens()

    def stats(self) -> EngineStats:
        """Totals so far, what is held now, and the waste of both."""
        return EngineStats(
            **vars(super().stats()),
            useful_tokens=self._num_useful,
            padded_tokens=self._num_padded,
            kv_bytes_reserved=self.executor.usage().kv_bytes_reserved,
        )

    def _schedule(self) -> SchedulerOutput | None:
        """Ask the scheduler; note what runs, for the totals."""
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            self._record.request_ids = scheduler_output.num_scheduled_tokens
            self._record.num_tokens = scheduler_output.total_num_scheduled_tokens
            prompts = [new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs]
            self._record.num_prompt_tokens = sum(map(len, prompts))
        self._record.lap("schedule")
        return scheduler_output

    def _sample(self, logits: Mapping[str, Tensor]) -> dict[str, SampledTokens]:
        """Sample a token for every request of this step; a row of logits that cannot be used ends its request."""
        usage = self.executor.usage()
        self._num_useful += usage.useful_tokens
        self._num_padded += usage.padded_tokens
        requests = [self.scheduler.requests[request_id] for request_id in logits]
        sampled, errors = self.sampling_step(requests, logits)
        for request_id, error in errors.items():
            self._fail([request_id], error)
        self._record.lap("sample")
        return sampled

    def _release(self, changed: Iterable[Request]) -> None:
        """Free the KV of the requests that have ended."""
        for request in changed:
            if request.is_finished:
                self.executor.free_request_cache(request.request_id)
