"""Engine core: one step of the engine, and the intake, errors and totals around it.

    schedule -> prepare inputs -> execute -> sample -> update -> make outputs -> release

`EngineCore.step` does these seven in this order. They are in a class of their own, because each milestone that changes
the step writes it whole in its own `engine_core.py`. All milestones share `EngineCoreBase`. Its `_run_or_fail` catches
an exception of the model or the sampler, `run_step` any other exception of a step, and `changing` holds Ctrl-C. m3
moves preparing and sampling into the model runner, next to the tensors. vLLM: `v1/engine/core.py`; SGLang:
`Scheduler.event_loop_normal`.
"""

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from m1_single_request.errors import EngineDeadError
from m1_single_request.events import StepDone
from m1_single_request.held_interrupt import HeldInterrupt
from m1_single_request.input_processor import InputProcessor
from m1_single_request.model_runner import ModelRunner
from m1_single_request.output_events import Sampled
from m1_single_request.output_processor import OutputProcessor, failed_output
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.part_error import part_error
from m1_single_request.request import BaseFinishReason, FinishAbort, FinishError, Request
from m1_single_request.sampler import SampledTokens, Sampler, impossible_row, not_finite, prompt_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.scheduler import Scheduler, SchedulerOutput
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer

ResultT = TypeVar("ResultT")


@dataclass
class StepRecord:
    """Counts and times of one step."""

    lap_began: float = field(default_factory=time.perf_counter)
    laps: list[tuple[str, float, float]] = field(default_factory=list)
    """The parts of the step so far, in order: each a `Phase` of its `StepDone`."""
    request_ids: Iterable[str] = ()
    """The requests in the batch: those that end if the model fails."""
    num_tokens: int = 0
    """Tokens in the batch, padding not counted."""
    num_prompt_tokens: int = 0
    """Prompt tokens among them; 0 if the model or the sampler failed."""
    changed: list[Request] = field(default_factory=list)
    """The requests that have an output."""

    def lap(self, phase: str) -> None:
        """Add the time since the previous lap to `phase`."""
        now = time.perf_counter()
        self.laps.append((phase, self.lap_began, now))
        self.lap_began = now


class EngineCoreBase(ABC):
    """Intake, aborts, errors and totals around a step, for every milestone. It has no thread of its own."""

    kv_bytes_per_token: int
    """Bytes of K and V of one token in all layers."""

    def __init__(
        self,
        input_processor: InputProcessor,
        queues: Any,
        output_processor: OutputProcessor,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        """`queues`: the owner of all unfinished requests, a scheduler for example. `parts`: classes by role, for error
        messages."""
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.tracer = tracer
        self.iteration = 0
        self.dead: EngineDeadError | None = None
        self.was_interrupted = False
        self.is_changing = False
        self._queues = queues
        self._intake = queues  # receives new requests, aborts and resets; from m3 on a part in front of the queues
        self._parts = parts
        self._open: dict[str, Request] = {}  # requests whose end no step has returned yet
        self._record = StepRecord()
        self._num_finished: dict[str, int] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    @abstractmethod
    def step(self) -> dict[str, RequestOutput]:
        """Compute one step; return the new output of every request that changed. Called by `run_step`."""

    @abstractmethod
    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""

    @abstractmethod
    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""

    def run_step(self) -> dict[str, RequestOutput]:
        """Run one step and add it to the totals; return the outputs of `step`, `{}` on an idle engine.

        An exception of `step` was raised while queues or memory were written. Then all requests end with that error,
        and the memory is empty afterwards.
        """
        self.check_alive()
        if not self.has_unfinished_requests():
            return {}
        self.tracer.step = self.iteration + 1
        self._record = StepRecord()
        try:
            outputs = self.step()
        except Exception as error:
            outputs = self._end_all(error)
        self._add_to_totals(self._record)
        return outputs

    def add_request(self, request: Request) -> None:
        """Queue a checked request; it runs in later steps."""
        self.check_alive()
        self._intake.add_request(request)
        self._open[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """Mark a request to end at the next step's update. False if it is unknown, finished or already marked."""
        return self.dead is None and bool(self._intake.finish_requests([request_id], FinishAbort()))

    def has_unfinished_requests(self) -> bool:
        """Return whether `run_step()` has anything to do."""
        return bool(self._open or self._queues.requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether no step has returned the end of this request yet."""
        return request_id in self._open

    def stats(self) -> EngineStats:
        """Return totals up to the last finished step, and what is held now."""
        kv_tokens = self.num_kv_tokens()
        return EngineStats(
            num_steps=self.iteration,
            num_waiting=len(self._queues.waiting),
            num_running=len(self._queues.running),
            num_finished=dict(self._num_finished),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self.kv_bytes_per_token,
            max_model_len=self.input_processor.max_model_len,
        )

    def close(self) -> None:
        """Release the KV of all requests."""
        self._forget_all(FinishAbort())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold Ctrl-C in the block. A second one stops the block with `KeyboardInterrupt`, by default. After that, and
        any other exception that is no `Exception`, the engine is dead and holds nothing.

        A class would be faster, and unsafe: a signal may come as its `__exit__` begins. A generator that is dropped
        ends by an exception."""
        with HeldInterrupt():
            before, self.is_changing = self.is_changing, True
            try:
                yield
            except Exception:
                raise
            except BaseException as interrupt:
                self.dead = EngineDeadError(f"a call was stopped in the middle by {type(interrupt).__name__}")
                self.was_interrupted = True
                self._open.clear()
                self._forget_all(FinishError(self.dead))
                raise
            finally:
                self.is_changing = before

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def _run_or_fail(self, phase: str, call: Callable[[Any], ResultT], argument: Any) -> ResultT | None:
        """Return `call(argument)`, whose time is that of `phase`. Return None if there is no argument, or if the call
        raises: then the requests of this step end with that error, and all requests if the device is lost."""
        if argument is None:
            return None
        try:
            return call(argument)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the forward, and the outputs hold them
            self._fail(self._record.request_ids, error)
            self._record.num_prompt_tokens = 0
            return None
        finally:
            self._record.lap(phase)

    def _make_outputs(self, changed: Iterable[Request]) -> dict[str, RequestOutput]:
        """Return the outputs of the requests that changed, by request id; with `final_only` at their end alone."""
        self._record.changed = list(changed)
        outputs: dict[str, RequestOutput] = {}
        for request in self._record.changed:
            if request.final_only and not request.is_finished:
                continue
            try:
                outputs[request.request_id] = self.output_processor.make_output(request)
            except Exception as error:  # a user's tokenizer, for example
                if request.is_finished:
                    request.finish_reason = FinishError(error)
                    outputs[request.request_id] = failed_output(request, error)
                else:  # it ends with the next step
                    self._fail([request.request_id], error)
        return outputs

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """Mark these requests to end with `error`; all requests if the device is lost."""
        error = self._judged(error)
        if self.dead is not None:
            request_ids = list(self._open)
        self._intake.finish_requests(request_ids, FinishError(error))

    def _judged(self, error: Exception) -> Exception:
        """Return `error`. A lost device makes it an `EngineDeadError`, and the engine dead."""
        if isinstance(error, torch.AcceleratorError):  # CUDA cannot be used any more in this process
            error = EngineDeadError(f"the device failed beyond recovery: {error}")
        if isinstance(error, EngineDeadError):
            self.dead = error
        return error

    # --- around a step ------------------------------------------------------------------------------------------------

    def _end_all(self, error: Exception) -> dict[str, RequestOutput]:
        """End all requests with `error`, which the bookkeeping of the step raised, and return their outputs."""
        error = self._judged(error)
        if self.dead is None:
            error = part_error(error, self._parts)
        self._forget_all(FinishError(error))
        return self._make_outputs(self._open.values())

    def _forget_all(self, reason: BaseFinishReason) -> None:
        """End all requests without a step. Queues, KV memory and caches are as they were at the start."""
        try:
            self._intake.reset(reason)
        finally:
            with suppress(torch.AcceleratorError):  # a lost device holds nothing any more
                self.clear_kv_caches()

    def _add_to_totals(self, record: StepRecord) -> None:
        """Add a finished step to the totals, and emit its `StepDone`."""
        record.lap("update")
        self.iteration += 1
        self._num_prompt_tokens += record.num_prompt_tokens
        self._num_output_tokens = self._queues.updater.num_output_tokens
        for request in record.changed:
            if request.finish_reason is not None:
                reason = request.finish_reason.reason
                self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
                self._open.pop(request.request_id, None)
        self.tracer.emit(StepDone.of, record, self._queues, self.num_kv_tokens)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the device was lost, or an interrupt stopped a call in the middle."""
        if self.dead is not None:
            raise EngineDeadError(f"the engine is dead and accepts nothing: {self.dead}") from self.dead


class EngineCore(EngineCoreBase):
    """Runs one request per step."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        sampler: Sampler,
        stop_checker: StopChecker,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        super().__init__(input_processor, scheduler, output_processor, parts, tracer)
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.sampler = sampler
        self.stop_checker = stop_checker
        self.kv_bytes_per_token = kv_bytes_per_token

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of the request that changed.

        An exception in the model or the sampler ends the request of this step, and only it; a lost device
        (`EngineDeadError`) ends all, and the engine with them.
        """
        scheduler_output = self._schedule()  # 1 schedule
        inputs = self._run_or_fail("execute", self.model_runner.prepare_inputs, scheduler_output)  # 2 prepare inputs
        logits = self._run_or_fail("execute", self.model_runner.execute_model, inputs)  # 3 execute
        sampled = self._run_or_fail("sample", self.sample, logits) or {}  # 4 sample
        changed = self.scheduler.update_from_output(scheduler_output, sampled)  # 5 update
        outputs = self._make_outputs(changed)  # 6 make outputs
        self._release(changed)  # 7 release
        return outputs

    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.model_runner.clear_kv_caches()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""
        return self.model_runner.num_kv_tokens()

    def _schedule(self) -> SchedulerOutput | None:
        """Run the scheduler; record the requests and tokens of the step, for the totals."""
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is not None:
            self._record.request_ids = [scheduler_output.request_id]
            self._record.num_tokens = len(scheduler_output.token_ids)
            self._record.num_prompt_tokens = 0 if scheduler_output.start_position else self._record.num_tokens
        self._record.lap("schedule")
        return scheduler_output

    def sample(self, logits: Mapping[str, Tensor]) -> dict[str, SampledTokens]:
        """Sample the next token of this step's request from the last row of its logits, float32 `[positions, vocab]`.

        The rows before give the log-probabilities of the prompt. Raises `ForwardError` for logits without a token.
        """
        ((request_id, rows),) = logits.items()
        request = self.scheduler.requests[request_id]
        sequence, params = request.sequence, request.sampling_params
        if not math.isfinite(rows.sum()) and not rows.isfinite().all():  # the sum takes less time, and may overflow
            raise not_finite(request_id)
        row = request.sampling_row(self.stop_checker.stop_ids(sequence))
        metadata = SamplingMetadata.from_rows([row], vocab_size=rows.shape[-1], device=rows.device)
        chosen = self.sampler(rows[-1:], metadata)
        if chosen.impossible_rows:
            raise impossible_row(request_id)
        position, text = len(sequence.output_token_ids), sequence.detokenizer.token_text
        self.tracer.emit(Sampled.of, request_id, params, position, rows[-1:], metadata, chosen, 0, text)
        of_prompt = prompt_logprobs(params, sequence.prompt_token_ids, rows) if position == 0 else None
        return {request_id: SampledTokens(chosen.token_ids, chosen.logprobs, of_prompt)}

    def _release(self, changed: Iterable[Request]) -> None:
        """Free the KV of the requests that have ended."""
        for request in changed:
            if request.is_finished:
                self.model_runner.free_request_cache(request.request_id)
