"""What every milestone's engine core does besides the step itself: intake, aborts, failures, outputs, totals.

The step is the course's subject, so each milestone that changes it writes it anew, in an `engine_core.py` of its own;
the rest is said once, here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sized
from itertools import pairwise
from typing import Protocol

import torch

from m1_single_request.errors import EngineDeadError, EngineUsageError
from m1_single_request.events import StepDone
from m1_single_request.input_processor import InputProcessor
from m1_single_request.operations import Operations, OperationsProtocol
from m1_single_request.output_processor import OutputProcessor, failed_output
from m1_single_request.outputs import EngineStats, RequestOutput
from m1_single_request.request import BaseFinishReason, FinishAbort, FinishError, Request
from m1_single_request.tracer import Tracer


class UnfinishedRequests(Protocol):
    """What the engine core asks of any scheduler, or of whoever stands before it, besides the two verbs of a step."""

    @property
    def requests(self) -> Mapping[str, Request]: ...
    @property
    def running(self) -> Sized: ...
    @property
    def waiting(self) -> Sized: ...
    def add_request(self, request: Request) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...


class KVHolder(Protocol):
    """Whoever holds the KV tensors: the model runner, or the executor that hides where the runner is."""

    kv_bytes_per_token: int

    def free_request_cache(self, request_id: str) -> None: ...
    def clear_kv_caches(self) -> None: ...
    def held_request_ids(self) -> list[str]: ...
    def num_kv_tokens(self) -> int: ...


class EngineCoreBase(ABC):
    """Owns the parts. Single-threaded: nothing happens outside `step()`.

    Seams for later milestones: `step`, which each writes anew; `stats`, which knows more there.
    Seams, too: `close`, which lets go of more there; `is_unfinished`, where a request may stand for several.
    """

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        unfinished: UnfinishedRequests,
        kv_holder: KVHolder,
        output_processor: OutputProcessor,
        tracer: Tracer,
    ) -> None:
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.tracer = tracer
        self.operations: OperationsProtocol = Operations()
        self.iteration = 0
        self.dead: EngineDeadError | None = None
        self._unfinished = unfinished
        self._kv_holder = kv_holder
        self._open: dict[str, Request] = {}  # requests whose end nobody was told yet
        self._told: set[str] = set()  # those among them whose end the last step returned
        self._counted: set[str] = set()  # those among them whose end is in the totals
        self._in_step = self._was_interrupted = False
        self._num_finished: dict[str, int] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0  # of finished requests

    @abstractmethod
    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of every request that changed. `{}` on an idle engine."""

    def add_request(self, request: Request) -> None:
        """Queue a checked request; it runs in later steps."""
        self._check_alive()
        self.forget_told()  # the id may be one of theirs
        self._unfinished.add_request(request)
        self._open[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """Mark a request to end at the next step's update. False if it is unknown, finished or already marked."""
        return bool(self._unfinished.finish_requests([request_id], FinishAbort()))

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        return len(self._open) > len(self._told) or self._unfinished.has_unfinished_requests()

    def is_unfinished(self, request_id: str) -> bool:
        """Whether this request still waits or runs, or no step has reported its end."""
        is_open = request_id in self._open and request_id not in self._told
        return is_open or request_id in self._unfinished.requests

    def forget_told(self) -> None:
        """The outputs of the last step reached their callers: whoever ended in it needs no record any more."""
        for request_id in list(self._told):
            self._open.pop(request_id, None)
            self._counted.discard(request_id)
            self._told.discard(request_id)

    def take_back(self, request_ids: Iterable[str] | None = None) -> None:
        """Outputs of the last step did not reach their callers (all of them, or those named): it is as if interrupted.

        The next step returns the ends among them again.
        """
        self._told.difference_update(self._told.copy() if request_ids is None else request_ids)
        self._in_step = True

    def stats(self) -> EngineStats:
        """Totals so far and what is held now."""
        kv_tokens = self._kv_holder.num_kv_tokens()
        unfinished = self._unfinished.requests.values()
        return EngineStats(
            num_steps=self.iteration,
            num_waiting=len(self._unfinished.waiting),
            num_running=len(self._unfinished.running),
            num_finished=dict(self._num_finished),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens + sum(r.sequence.get_output_len() for r in unfinished),
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * self._kv_holder.kv_bytes_per_token,
            max_model_len=self.input_processor.max_model_len,
        )

    def flush_cache(self) -> bool:
        """Forget the KV that no request needs any more. False, and nothing is forgotten, while requests are unfinished.

        Here nothing outlives its request, so there is nothing to forget; m4 keeps what others may use.
        """
        if self.has_unfinished_requests():
            return False
        self._kv_holder.clear_kv_caches()
        return True

    def update_weights(self, model: str) -> None:
        """Load other weights and forget all KV. Raises `EngineUsageError` under load, or if this engine cannot."""
        if self.has_unfinished_requests():
            raise EngineUsageError("weights are exchanged between requests, and some are unfinished")
        self.operations.update_weights(model)
        self.flush_cache()

    def close(self) -> None:
        """Release the KV of all requests."""
        self.operations.close()
        if self.dead is None:
            self._kv_holder.clear_kv_caches()
        for request_id in self._kv_holder.held_request_ids():
            self._free(request_id)

    def _begin_step(self) -> bool:
        """Start a step, or release what an interrupted one left behind and return False: there is nothing to do."""
        self._check_alive()
        self.forget_told()
        if not self.has_unfinished_requests():
            self._release()
            return False
        self._was_interrupted, self._in_step = self._in_step, True
        if self._was_interrupted:  # before anybody is admitted: what an ended request still holds may be given away
            self._release()
        self.iteration += 1
        self.tracer.step = self.iteration
        return True

    def _and_unreported(self, changed: list[Request]) -> list[Request]:
        """Add the requests that ended in a step that was interrupted before it could say so."""
        if not self._was_interrupted:
            return changed
        return changed + [r for r in self._open.values() if r.is_finished and r not in changed]

    def _make_outputs(self, changed: Iterable[Request]) -> dict[str, RequestOutput]:
        """What the callers of these requests see now.

        Who waits for a whole answer only gets no output before. The trace hears of all: `TextHeld` comes from here.
        """
        outputs: dict[str, RequestOutput] = {}
        for request in changed:
            asked = request.is_finished or not request.final_only
            if not asked and not self.tracer:
                continue
            try:
                output = self.output_processor.make_output(request)
            except Exception as error:  # a tokenizer of somebody's own, say: no other request may suffer
                if not request.is_finished:  # it ends with the next step
                    self._fail([request.request_id], error)
                    continue
                request.finish_reason = FinishError(error)
                output = failed_output(request, error)
            if asked:
                outputs[request.request_id] = output
        return outputs

    def _release(self) -> None:
        """Free the KV of every request that the scheduler no longer knows.

        It looks at what is held, not at what has just finished: a step that was interrupted on its way leaves nothing
        behind.
        """
        for request_id in self._kv_holder.held_request_ids():
            if request_id not in self._unfinished.requests:
                self._free(request_id)

    def _free(self, request_id: str) -> None:
        """Free the KV of a request; if the device turns out to be lost, its memory is, too."""
        try:
            self._kv_holder.free_request_cache(request_id)
        except torch.AcceleratorError as error:
            if self.dead is None:
                self._fail([], error)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """Mark these requests, or all of them if the device is lost, to end with this error."""
        if isinstance(error, torch.AcceleratorError):  # CUDA cannot be used any more in this process
            error = EngineDeadError(f"the device failed beyond recovery: {error}")
        if isinstance(error, EngineDeadError):
            self.dead = error
            request_ids = list(self._unfinished.requests)
        self._unfinished.finish_requests(request_ids, FinishError(error))

    def _fail_each(self, errors: Mapping[str, Exception]) -> None:
        """Mark each request to end with an error of its own."""
        for request_id, error in errors.items():
            self._fail([request_id], error)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine is dead and accepts nothing: {self.dead}") from self.dead

    def _end_step(
        self, times: list[float], *, num_tokens: int, num_prompt_tokens: int, changed: Iterable[Request]
    ) -> None:
        """Add a step to the totals and tell the trace where its time went.

        `times`: when it began, and when schedule, execute and sample were over. `num_prompt_tokens`: those among
        `num_tokens` that were prefilled.
        """
        self._num_prompt_tokens += num_prompt_tokens
        ended = [request for request in changed if request.is_finished]
        for request in ended:
            if request.finish_reason is not None and request.request_id not in self._counted:
                self._counted.add(request.request_id)
                self._num_output_tokens += request.num_output_tokens
                reason = request.finish_reason.reason
                self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
        if self.tracer:
            laps = pairwise([*times, time.perf_counter()])
            schedule, execute, sample, update = ((after - before) * 1e3 for before, after in laps)
            self.tracer.emit(
                StepDone(
                    num_tokens=num_tokens,
                    num_waiting=len(self._unfinished.waiting),
                    num_running=len(self._unfinished.running),
                    kv_tokens=self._kv_holder.num_kv_tokens(),
                    schedule_ms=schedule,
                    execute_ms=execute,
                    sample_ms=sample,
                    update_ms=update,
                )
            )
        self._told.update(request.request_id for request in ended if request.request_id in self._open)
        self._in_step = False
