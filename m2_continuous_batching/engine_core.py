"""Engine core: the seven stages of m1's step, for a batch of requests.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

Compare it with m1's: the order is the same, and no stage depends on the number of requests. The data have changed: the
scheduler returns a batch, an executor runs it, and all its rows are sampled together. vLLM: `v1/engine/core.py`;
SGLang: `Scheduler.event_loop_normal`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from m1_single_request.engine_core import EngineCoreBase, StepRecord
from m1_single_request.errors import ForwardError
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_events import Sampled
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m1_single_request.sampler import SampledTokens, Sampler, impossible_row, not_finite, prompt_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.outputs import BatchUsage, EngineStats
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.scheduler_output import SchedulerOutput


class EngineCore(EngineCoreBase):
    """Engine core that runs a batch of requests per step. `stats` adds the padding and the reserved memory, and
    `_add_to_totals` counts the padding."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        sampler: Sampler,
        stop_checker: StopChecker,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        super().__init__(input_processor, scheduler, output_processor, parts, tracer)
        self.scheduler = scheduler
        self.executor = executor
        self.sampler = sampler
        self.stop_checker = stop_checker
        self.kv_bytes_per_token = kv_bytes_per_token
        self._num_useful = self._num_padded = 0
        self._forward: BatchUsage | None = None  # of this step, if it succeeded

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of every request that changed.

        An exception in the model or the sampler ends only the requests of this step. A row of logits that cannot be
        used ends only its own request. A lost device (`EngineDeadError`) ends all requests and the engine.
        """
        scheduler_output = self._schedule()  # 1 schedule
        batch = self._run_or_fail("execute", prepare_inputs_from_scheduler_output, scheduler_output)  # 2 prepare inputs
        logits = self._run_or_fail("execute", self.executor.execute_model_batch, batch)  # 3 execute
        sampled = self._run_or_fail("sample", self.sample, logits) or {}  # 4 sample
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
        """Return the totals so far, the memory in use, the padding and the reserved memory."""
        return EngineStats(
            **vars(super().stats()),
            useful_tokens=self._num_useful,
            padded_tokens=self._num_padded,
            kv_bytes_reserved=self.executor.usage().kv_bytes_reserved,
        )

    def _schedule(self) -> SchedulerOutput | None:
        """Run the scheduler; record the requests and tokens of the step."""
        self._forward = None
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            self._record.request_ids = scheduler_output.num_scheduled_tokens
            self._record.num_tokens = scheduler_output.total_num_scheduled_tokens
            prompts = [new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs]
            self._record.num_prompt_tokens = sum(map(len, prompts))
        self._record.lap("schedule")
        return scheduler_output

    def sample(self, logits: Mapping[str, Tensor]) -> dict[str, SampledTokens]:
        """Sample the next token of every request of this step; logits that cannot be used end their request.

        `logits[request_id]` is float32 `[positions, vocab]`: its last row gives the next token, the rows before it the
        log-probabilities of the prompt, if requested.
        """
        self._forward = self.executor.usage()
        errors = _not_finite(logits)
        requests = [self.scheduler.requests[request_id] for request_id in logits if request_id not in errors]
        sampled: dict[str, SampledTokens] = {}
        if requests:
            last = torch.stack([logits[request.request_id][-1] for request in requests])  # [requests, vocab]
            rows = [request.sampling_row(self.stop_checker.stop_ids(request.sequence)) for request in requests]
            metadata = SamplingMetadata.from_rows(rows, vocab_size=last.shape[-1], device=last.device)
            chosen = self.sampler(last, metadata)
            for row, request in enumerate(requests):
                request_id, sequence, params = request.request_id, request.sequence, request.sampling_params
                if row in chosen.impossible_rows:
                    errors[request_id] = impossible_row(request_id)
                    continue
                position, text = len(sequence.output_token_ids), sequence.detokenizer.token_text
                self.tracer.emit(Sampled.of, request_id, params, position, last, metadata, chosen, row, text)
                of_prompt = None
                if position == 0:
                    of_prompt = prompt_logprobs(params, sequence.prompt_token_ids, logits[request_id])
                sampled[request_id] = SampledTokens((chosen.token_ids[row],), (chosen.logprobs[row],), of_prompt)
        for request_id, error in errors.items():
            self._fail([request_id], error)
        return sampled

    def _add_to_totals(self, record: StepRecord) -> None:
        super()._add_to_totals(record)
        if self._forward is not None:
            self._num_useful += self._forward.useful_tokens
            self._num_padded += self._forward.padded_tokens

    def _release(self, changed: Iterable[Request]) -> None:
        """Free the KV of the requests that have ended."""
        for request in changed:
            if request.is_finished:
                self.executor.free_request_cache(request.request_id)


def _not_finite(logits: Mapping[str, Tensor]) -> dict[str, ForwardError]:
    """Return an error for each request whose logits contain NaN or infinity."""
    sums = torch.stack([rows[-1] for rows in logits.values()]).sum(dim=-1).tolist()  # not finite: the row may be broken
    return {
        request_id: not_finite(request_id)
        for (request_id, rows), total in zip(logits.items(), sums, strict=True)
        if (len(rows) > 1 or not math.isfinite(total)) and not rows.isfinite().all()
    }
