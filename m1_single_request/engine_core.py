"""One step of the engine: the loop that everything in this course hangs on.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

All seven stand in `step()`, in this order. m3 moves preparing and sampling into the model runner, next to the tensors.
vLLM: `v1/engine/core.py`; SGLang: `Scheduler.event_loop_normal`.
"""

import time
from itertools import pairwise

import torch
from torch import Tensor

from m1_single_request.errors import EngineDeadError
from m1_single_request.events import Sampled, StepDone
from m1_single_request.input_processor import InputProcessor
from m1_single_request.model_runner import ModelRunner
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.request import FinishAbort, FinishError, Request
from m1_single_request.sampler import Sampler, gather_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.scheduler import SampledTokens, Scheduler, SchedulerOutput
from m1_single_request.tracer import Tracer

NUM_CANDIDATES = 4  # how many of the model's favourites the trace names


class EngineCore:
    """Owns the parts and turns the crank. Single-threaded: nothing happens outside `step()`."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        sampler: Sampler,
        output_processor: OutputProcessor,
        tracer: Tracer,
    ) -> None:
        self.input_processor = input_processor
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampler = sampler
        self.output_processor = output_processor
        self.tracer = tracer
        self.iteration = 0
        self.dead: EngineDeadError | None = None
        self._num_finished: dict[str, int] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0  # of finished requests

    def add_request(self, request: Request) -> None:
        """Queue a checked request; it runs in later steps."""
        self._check_alive()
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> bool:
        """Mark a request to end at the next step's update. False if it is unknown, finished or already marked."""
        return bool(self.scheduler.finish_requests([request_id], FinishAbort()))

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request still waits or runs."""
        return request_id in self.scheduler.requests

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of every request that changed. `{}` on an idle engine.

        An exception in the model or the sampler fails the requests of this step, and only them; a lost device
        (`EngineDeadError`) fails all, and the engine with them.
        """
        self._check_alive()
        if not self.has_unfinished_requests():
            self._release()
            return {}
        self.iteration += 1
        self.tracer.step = self.iteration
        times = [time.perf_counter()]
        scheduler_output = self.scheduler.schedule()  # 1 schedule
        times.append(time.perf_counter())
        sampled: dict[str, SampledTokens] = {}
        if scheduler_output is not None:
            try:
                inputs = self.model_runner.prepare_inputs(scheduler_output)  # 2 prepare inputs
                logits = self.model_runner.execute_model(inputs)  # 3 execute
                times.append(time.perf_counter())
                sampled = self._sample(scheduler_output, logits)  # 4 sample
            except Exception as error:
                self._fail(scheduler_output, error)
        times += [time.perf_counter()] * (4 - len(times))  # a step that ran nothing, or failed, has empty phases
        changed = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        outputs = {r.request_id: self.output_processor.make_output(r) for r in changed}  # 6 make outputs
        self._release()  # 7 release
        self._count(scheduler_output, sampled, changed)
        times.append(time.perf_counter())
        if self.tracer:
            schedule, execute, sample, update = ((after - before) * 1e3 for before, after in pairwise(times))
            self.tracer.emit(
                StepDone(
                    num_tokens=len(scheduler_output.token_ids) if scheduler_output else 0,
                    num_waiting=len(self.scheduler.waiting),
                    num_running=len(self.scheduler.running),
                    kv_tokens=self.model_runner.num_kv_tokens(),
                    schedule_ms=schedule,
                    execute_ms=execute,
                    sample_ms=sample,
                    update_ms=update,
                )
            )
        return outputs

    def stats(self) -> EngineStats:
        """Totals so far and what is held now."""
        kv_tokens = self.model_runner.num_kv_tokens()
        unfinished = self.scheduler.requests.values()
        return EngineStats(
            num_steps=self.iteration,
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_finished=dict(self._num_finished),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens + sum(r.sequence.get_output_len() for r in unfinished),
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self.model_runner.kv_bytes_per_token,
        )

    def close(self) -> None:
        """Release the KV of all requests."""
        self.model_runner.clear_kv_caches()

    def _sample(self, scheduler_output: SchedulerOutput, logits: dict[str, Tensor]) -> dict[str, SampledTokens]:
        """Choose the next token of every request that has logits."""
        requests = [self.scheduler.requests[request_id] for request_id in logits]
        last = next(iter(logits.values()))[-1:]  # [1, vocab]; m2 stacks one row per request here
        rows = [self._sampling_row(request) for request in requests]
        metadata = SamplingMetadata.from_rows(rows, vocab_size=last.shape[-1], device=last.device)
        chosen = self.sampler(last, metadata)
        if self.tracer:
            self._trace_sampled(requests[0], last, metadata, chosen.token_ids[0])
        result = {}
        for request, token_id, logprobs in zip(requests, chosen.token_ids, chosen.logprobs, strict=True):
            prompt_logprobs = None
            if scheduler_output.wants_prompt_logits:
                k = request.sampling_params.prompt_logprobs or 0
                targets = last.new_tensor(request.prompt_token_ids[1:]).long()
                prompt_logprobs = tuple(gather_logprobs(logits[request.request_id][:-1], targets, k))
            result[request.request_id] = SampledTokens((token_id,), (logprobs,), prompt_logprobs)
        return result

    def _sampling_row(self, request: Request) -> SamplingRow:
        sequence = request.sequence
        return SamplingRow(
            params=request.sampling_params,
            seed=request.seed,
            prompt_token_ids=sequence.data.prompt_token_ids,
            output_token_ids=sequence.data.output_token_ids,
            stop_ids=self.scheduler.stop_checker.stop_ids(sequence),
        )

    def _trace_sampled(self, request: Request, logits: Tensor, metadata: SamplingMetadata, token_id: int) -> None:
        if self.tracer:
            text, params = request.sequence.detokenizer.token_text, request.sampling_params
            best, ids = logits[0].softmax(-1).topk(min(NUM_CANDIDATES, logits.shape[-1]))
            self.tracer.emit(
                Sampled(
                    rid=request.request_id,
                    position=request.sequence.get_output_len(),
                    token_id=token_id,
                    text=text(token_id),
                    greedy=params.is_greedy,
                    settings=params.describe(),
                    uniform=None if metadata.uniforms is None else float(metadata.uniforms[0]),
                    candidates=tuple((text(i), p) for i, p in zip(ids.tolist(), best.tolist(), strict=True)),
                )
            )

    def _release(self) -> None:
        """Free the KV of every request that the scheduler no longer knows.

        It looks at what is held, not at what has just finished: a step that was interrupted on its way leaves nothing
        behind.
        """
        for request_id in self.model_runner.held_request_ids():
            if request_id not in self.scheduler.requests:
                self.model_runner.free_request_cache(request_id)

    def _fail(self, scheduler_output: SchedulerOutput, error: Exception) -> None:
        """Mark the requests of the failed step, or all of them if the device is lost, to end with this error."""
        failed = [scheduler_output.request_id]
        if isinstance(error, torch.AcceleratorError):  # CUDA cannot be used any more in this process
            error = EngineDeadError(f"the device failed beyond recovery: {error}")
        if isinstance(error, EngineDeadError):
            self.dead = error
            failed = list(self.scheduler.requests)
        self.scheduler.finish_requests(failed, FinishError(error))

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine is dead and accepts nothing: {self.dead}") from self.dead

    def _count(
        self, scheduler_output: SchedulerOutput | None, sampled: dict[str, SampledTokens], changed: list[Request]
    ) -> None:
        if sampled and scheduler_output is not None and scheduler_output.is_prefill:
            self._num_prompt_tokens += len(scheduler_output.token_ids)
        for request in changed:
            if request.finish_reason is not None:
                self._num_output_tokens += request.sequence.get_output_len()
                reason = request.finish_reason.reason
                self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
