"""What surrounds a step, for every milestone: intake, aborts, errors, outputs, totals.

Apart from `engine_core.py`, because the step is the course's subject: each milestone that changes it writes it whole in
an `engine_core.py` of its own, and all of them share this file.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from m1_single_request.errors import EngineDeadError
from m1_single_request.events import StepDone
from m1_single_request.held_interrupt import HeldInterrupt
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor, failed_output
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.part_error import part_error
from m1_single_request.request import BaseFinishReason, FinishAbort, FinishError, Request
from m1_single_request.tracer import Tracer

PHASES = ("schedule", "execute", "sample", "update")
ResultT = TypeVar("ResultT")


class RequestHolder(Protocol):
    """The scheduler, or what stands before it: the owner of all unfinished requests."""

    @property
    def requests(self) -> Mapping[str, Request]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def running(self) -> Sized: ...
    @property
    def waiting(self) -> Sized: ...
    def add_request(self, request: Request) -> None: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...
    def reset(self, reason: BaseFinishReason) -> None: ...


class KVHolder(Protocol):
    """The owner of the KV: the model runner, or the executor in front of it."""

    kv_bytes_per_token: int

    def clear_kv_caches(self) -> None: ...
    def num_kv_tokens(self) -> int: ...


@dataclass
class StepRecord:
    """Counts and times of the step that runs."""

    lap_began: float = field(default_factory=time.perf_counter)
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    request_ids: Iterable[str] = ()
    """The requests in the batch."""
    num_tokens: int = 0
    """Tokens in the batch, padding not counted."""
    num_prompt_tokens: int = 0
    """Prompt tokens among them; 0 if the model failed."""
    changed: list[Request] = field(default_factory=list)
    """The requests that have an output."""

    def lap(self, phase: str) -> None:
        """Add the time since the previous lap to `phase`."""
        now = time.perf_counter()
        self.ms[phase] += (now - self.lap_began) * 1e3
        self.lap_began = now


class EngineCoreBase(ABC):
    """Owns the parts. Single-threaded: nothing happens outside `run_step()`."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        holder: RequestHolder,
        kv_holder: KVHolder,
        output_processor: OutputProcessor,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None:
        """`parts`: the table that the engine is assembled from, for error messages."""
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.tracer = tracer
        self.iteration = 0
        self.dead: EngineDeadError | None = None
        self._parts = parts
        self._holder = holder
        self._kv_holder = kv_holder
        self._open: dict[str, Request] = {}  # requests whose end no step has returned yet
        self._record = StepRecord()
        self._num_finished: dict[str, int] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    @abstractmethod
    def step(self) -> dict[str, RequestOutput]:
        """Compute one step; return the new output of every request that changed. `run_step` is what others call."""

    def run_step(self) -> dict[str, RequestOutput]:
        """Run one step and add it to the totals; return the outputs of `step`, `{}` on an idle engine.

        What `step` raises was raised while queues or memory were written: all requests end with that error, and the
        memory is empty afterwards.
        """
        self._check_alive()
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
        self._check_alive()
        self._holder.add_request(request)
        self._open[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """Mark a request to end at the next step's update. False if it is unknown, finished or already marked."""
        return self.dead is None and bool(self._holder.finish_requests([request_id], FinishAbort()))

    def has_unfinished_requests(self) -> bool:
        """Whether `run_step()` has anything to do."""
        return bool(self._open or self._holder.requests)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether no step has returned the end of this request yet."""
        return request_id in self._open

    def stats(self) -> EngineStats:
        """Totals up to the last finished step, and what is held now."""
        kv_tokens = self._kv_holder.num_kv_tokens()
        return EngineStats(
            num_steps=self.iteration,
            num_waiting=len(self._holder.waiting),
            num_running=len(self._holder.running),
            num_finished=dict(self._num_finished),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self._kv_holder.kv_bytes_per_token,
            max_model_len=self.input_processor.max_model_len,
        )

    def close(self) -> None:
        """Release the KV of all requests."""
        with self.changing():
            self._forget_all(FinishAbort())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold Ctrl-C in the block. If the block is interrupted all the same, the engine is dead and holds nothing."""
        with HeldInterrupt():
            try:
                yield
            except Exception:
                raise
            except BaseException as interrupt:
                self.dead = EngineDeadError(f"a call was stopped in the middle by {type(interrupt).__name__}")
                self._forget_all(FinishError(self.dead))
                self._open.clear()
                raise

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def _attempt(self, call: Callable[[Any], ResultT], argument: Any) -> ResultT | None:
        """Return `call(argument)`. Return None if there is no argument, or if the call raises: then the requests of
        this step end with that error, and all requests if the device is lost."""
        if argument is None:
            return None
        try:
            return call(argument)
        except Exception as error:
            self._fail(self._record.request_ids, error)
            self._record.num_prompt_tokens = 0
            return None
        finally:
            self._record.lap("execute")

    def _make_outputs(self, changed: Iterable[Request]) -> dict[str, RequestOutput]:
        """Return the outputs of the requests that changed, by request id.

        A request with `final_only` has one output, at its end.
        """
        self._record.changed = list(changed)
        outputs: dict[str, RequestOutput] = {}
        for request in self._record.changed:
            if request.final_only and not request.is_finished:
                continue
            try:
                output = self.output_processor.make_output(request)
            except Exception as error:  # a user's tokenizer, for example
                if not request.is_finished:  # it ends with the next step
                    self._fail([request.request_id], error)
                    continue
                request.finish_reason = FinishError(error)
                output = failed_output(request, error)
            outputs[request.request_id] = output
        return outputs

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """Mark these requests to end with `error`; all requests if the device is lost."""
        error = self._judged(error)
        if self.dead is not None:
            request_ids = list(self._holder.requests)
        self._holder.finish_requests(request_ids, FinishError(error))

    def _fail_each(self, errors: Mapping[str, Exception]) -> None:
        """Mark each request to end with its own error."""
        for request_id, error in errors.items():
            self._fail([request_id], error)

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
        self._holder.reset(reason)
        with suppress(torch.AcceleratorError):  # a lost device holds nothing any more
            self._kv_holder.clear_kv_caches()

    def _add_to_totals(self, record: StepRecord) -> None:
        """Add a finished step to the totals, and emit its `StepDone`."""
        record.lap("update")
        self.iteration += 1
        self._num_prompt_tokens += record.num_prompt_tokens
        self._num_output_tokens = self._holder.num_output_tokens
        for request in record.changed:
            if request.finish_reason is not None:
                reason = request.finish_reason.reason
                self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
                self._open.pop(request.request_id, None)
        self.tracer.emit(StepDone.of, record, self._holder, self._kv_holder)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine is dead and accepts nothing: {self.dead}") from self.dead
