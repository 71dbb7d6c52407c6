"""m6's engine core with one step in flight: compare `step` with m4's.

    normal       schedule N+1 -> execute N+1 -> update N+1 -> make outputs N+1
    overlapped   schedule N+1 -> launch N+1 -> arrive N -> update N -> make outputs N

So the device has the next step before the host knows the last tokens. Where they must be known first
(`ForwardOutput.why_host`), arrive N comes before launch N+1. To book a step is to update its requests and to make their
outputs. The first call of a burst returns nothing, and each later one the outputs of the step before. The last call
books two steps, and so does one whose step gives the log-probabilities of a prompt. SGLang:
`Scheduler.event_loop_overlap`.
"""

import copy
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from m1_single_request.engine_core import StepRecord
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import BaseFinishReason
from m3_paged_attention.executor import GPUExecutor, accepted
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker
from m4_radix_cache.model_worker_batch import ForwardMode
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.proposer import DraftModelProposer
from m6_multimodal_pd.dropped import when_dropped
from m6_multimodal_pd.engine_core import EngineCore
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched
from m6_multimodal_pd.overlap.late_results import LateResults
from m6_multimodal_pd.overlap.launched_step import LaunchedStep
from m6_multimodal_pd.overlap.launcher import ForwardOutput, Launcher


class UsualParts(NamedTuple):
    """The classes whose methods this engine core knows, and replaces."""

    scheduler: type = Scheduler
    executor: type = GPUExecutor
    worker: type = GPUWorker
    model_runner: type = ModelRunner


def obstacle(executor: Any, scheduler: Any, usual: UsualParts) -> str | None:
    """Return why the parts of an engine do not allow overlapped steps, or None."""
    if type(scheduler.speculation.proposer) not in (type(None), DraftModelProposer):
        return "drafts continue the newest tokens, which must be known when a step is scheduled"
    worker = getattr(executor, "worker", None)
    for role, part, methods in (
        ("scheduler", scheduler, ("schedule", "update_from_output", "process_batch_result")),
        ("executor", executor, ("execute_model",)),
        ("worker", worker, ("execute_model",)),
        ("model_runner", getattr(worker, "model_runner", None), ("execute_model",)),
    ):
        known = getattr(usual, role)
        if any(getattr(type(part), name, None) is not getattr(known, name) for name in methods):
            return f"the part {role!r} has its own {' or '.join(methods)}, which would not be called"
    return None


BOOKED = StepRecord()
"""In place of the record of a step that is in the totals."""


class InFlight(NamedTuple):
    """A launched step: for the scheduler, on the device, and for the totals."""

    step: LaunchedStep
    forward: ForwardOutput
    record: StepRecord


class OverlapEngineCore(EngineCore):
    """Launches a step before it books the one before.

    `step` does that, `_add_to_totals` and `_end_all` count a step when it is booked or ended by an error, `_forget_all`
    and `close` first drop the step in flight, and `check_invariants` knows of it.
    """

    usual_parts = UsualParts()
    launcher_class: type[Launcher] = Launcher

    def __init__(self, **parts: Any) -> None:
        """`parts`: as m6's."""
        super().__init__(**parts)
        self.late = LateResults(parts["scheduler"])
        self.in_flight: InFlight | None = None
        self.launcher: Any = None
        self.obstacle = obstacle(self.executor, self.scheduler, self.usual_parts)
        if self.obstacle is None:
            self.launcher = self.launcher_class(self.executor.worker, self.scheduler.pools.req_to_token_pool.size)
            self.obstacle = self.launcher.obstacle()
            self.profiler.settle = self.launcher.wait
            when_dropped(self, self.launcher.close)  # before the memory is freed that its thread reads
        self.tracer.emit(NormalOrder.of, self.obstacle)
        self._outputs: dict[str, RequestOutput] = {}  # of the call that runs

    def step(self) -> dict[str, RequestOutput]:
        """Launch the next step, N + 1, then book the one in flight, N; return its outputs. Errors are those of m4's
        step."""
        if self.obstacle is not None:
            return super().step()
        self._outputs, before = {}, self.in_flight
        if before is None and self.scheduler.marked:
            self._book(None, None)  # what was aborted ends in a step of its own
        batch, record = self._schedule(before)  # 1 schedule N + 1
        if before is not None and (batch is None or before.forward.must_arrive):
            self._arrive(before, batch)
        self.in_flight = None if batch is None else self._start(batch, before, record)  # 2 launch N + 1
        if before is not None:
            self._arrive(before, None)  # 3 arrive N, unless it has arrived
        if before is not None or (self.in_flight is None and self.scheduler.marked):
            self._book(before, self.in_flight)  # 4 update N, 5 make outputs
        if self.in_flight is not None and self._must_arrive(self.in_flight):  # 3, 4 and 5 of N + 1
            before, self.in_flight = self.in_flight, None
            self._arrive(before, None)
            self._book(before, None)
        self._record = BOOKED
        return self._outputs

    def _must_arrive(self, in_flight: InFlight) -> bool:
        """Return whether a step is booked in the call that launched it: nothing can be launched behind it, or the
        log-probabilities of its prompts are needed before a request of it may be retracted."""
        return bool(in_flight.forward.batch.prompts_to_rate) or self.late.nothing_follows(in_flight.step)

    def _schedule(self, before: InFlight | None) -> tuple[ScheduleBatch | None, StepRecord]:
        """Choose the batch of the next step, behind the one in flight."""
        self._record = record = StepRecord()
        self.tracer.step = self.iteration + (1 if before is None else 2)
        batch = self.late.schedule(None if before is None else before.step)
        record.lap("schedule")
        return batch, record

    def _start(self, batch: ScheduleBatch, before: InFlight | None, record: StepRecord) -> InFlight:
        """Launch a batch, whose sampling parameters stay as they are now."""
        number = self.tracer.step = self.iteration + (1 if before is None else 2)
        record.lap_began = time.perf_counter()
        behind = None if before is None or before.forward.has_arrived else before.forward
        work = self._prepared(batch, before if behind is not None else None)
        record.request_ids, record.num_tokens = work.rids, len(work.input_ids)
        record.num_prompt_tokens = work.num_prompt_tokens
        forward: ForwardOutput
        if work.forward_mode is ForwardMode.PREBUILT:
            forward = self.launcher.prebuilt(work, self.executor.execute_model(work))
        else:
            forward = self.launcher.launch(self.with_images(work), behind)
        forward.waited_for = None if before is None or behind is not None else before.forward.why_host
        step = self.late.launched(number, batch)
        self.tracer.emit(StepLaunched.of, forward, None if before is None else before.step.number)
        record.lap("execute")
        return InFlight(step, forward, record)

    def _prepared(self, batch: ScheduleBatch, behind: InFlight | None) -> Any:
        """Return the data of a batch for the runner. The tokens of the step in flight, `behind` which it is launched,
        are counted on the device."""
        if behind is not None:
            self.late.expect(behind.step, batch, self.launcher.newest_tokens)
        work: Any = batch.get_model_worker_batch()
        if work.sampling_info.newest is None:
            work.sampling_info.metadata()  # on the device once, for all copies
        return replace(work, sampling_info=copy.copy(work.sampling_info))

    def _arrive(self, arriving: InFlight, scheduled: ScheduleBatch | None) -> None:
        """Wait for a step, and read its tokens, or sample them; once. `scheduled`: the batch of the next launch."""
        if arriving.forward.has_arrived:
            return
        record, self.tracer.step = arriving.record, arriving.step.number
        record.lap_began = time.perf_counter()
        self.launcher.arrive(arriving.forward)
        self.tracer.emit(StepArrived.of, arriving.forward)
        self.late.arrived(arriving.step, arriving.forward.output, scheduled)
        record.lap("execute")

    def _book(self, arrived: InFlight | None, ahead: InFlight | None) -> None:
        """Book a step that has arrived, and add its outputs to those of the call; `ahead`: the one that is in flight
        now. Without a step the requests end that are marked."""
        self._record = StepRecord() if arrived is None else arrived.record
        self._record.lap_began = time.perf_counter()
        step = None if arrived is None else arrived.step
        self.tracer.step = self.iteration + 1
        output = self._run_or_fail("execute", self._accept_result, arrived)
        changed = self.late.update(step, output, None if ahead is None else ahead.step)
        self._outputs |= self._make_outputs(self.families.reported(changed))
        super()._add_to_totals(self._record)
        self._record = StepRecord()  # of an error that comes now

    def _accept_result(self, arrived: InFlight) -> ModelRunnerOutput:
        return accepted(self.launcher.result(arrived.forward), self._record, self._fail)

    def _add_to_totals(self, record: StepRecord) -> None:
        """Do nothing for a step that is in the totals."""
        if record is not BOOKED:
            super()._add_to_totals(record)

    def _end_all(self, error: Exception) -> dict[str, RequestOutput]:
        """End all requests with an error, in the next step that is not booked. Those that have ended in the same call
        keep their outputs."""
        self.tracer.step = self.iteration + 1
        return self._outputs | super()._end_all(error)

    def _forget_all(self, reason: BaseFinishReason) -> None:
        """Drop the step in flight, and end all requests."""
        if self.launcher is not None:
            with suppress(torch.AcceleratorError):  # a lost device computes nothing any more
                self.launcher.wait()
        self.in_flight = None
        self.late.reset()
        super()._forget_all(reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if requests and memory contradict each other."""
        self.late.check_invariants(None if self.in_flight is None else self.in_flight.step)

    def close(self) -> None:
        """Drop the step in flight, close as m6's engine core, and end the thread."""
        try:
            super().close()
        finally:
            if self.launcher is not None:
                self.launcher.close()
