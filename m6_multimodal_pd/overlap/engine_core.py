"""m6's engine core with one step in flight: compare `step` with m4's.

    normal       schedule N+1 -> execute N+1 -> update N+1 -> make outputs N+1
    overlapped   schedule N+1 -> arrive N -> launch N+1 -> update N -> make outputs N

So the first call of a burst returns nothing, and each later one the outputs of the step before. The last call books two
steps. SGLang: `Scheduler.event_loop_overlap`.
"""

import copy
import time
from dataclasses import replace
from typing import Any, NamedTuple

from m1_single_request.engine_core import StepRecord
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import BaseFinishReason
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker
from m4_radix_cache.model_worker_batch import ForwardMode
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.proposer import DraftModelProposer
from m6_multimodal_pd.engine_core import EngineCore
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched
from m6_multimodal_pd.overlap.late_results import LateResults, Step
from m6_multimodal_pd.overlap.launcher import ForwardOutput, Launcher


def obstacle(executor: Any, scheduler: Any, launcher: Launcher) -> str | None:
    """Return why the steps of an engine cannot overlap, or None."""
    if type(scheduler.speculation.proposer) not in (type(None), DraftModelProposer):
        return "drafts continue the newest tokens, which must be known when a step is scheduled"
    for role, part, usual, methods in (
        ("scheduler", scheduler, Scheduler, ("schedule", "update_from_output", "process_batch_result")),
        ("executor", executor, GPUExecutor, ("execute_model",)),
        ("worker", launcher.worker, GPUWorker, ("execute_model", "run")),
        ("model_runner", launcher.runner, ModelRunner, ("execute_model",)),
    ):
        if any(getattr(type(part), name, None) is not getattr(usual, name) for name in methods):
            return f"the part {role!r} has its own {' or '.join(methods)}, which would not be called"
    return launcher.obstacle()


BOOKED = StepRecord()
"""In place of the record of a step that is in the totals."""


class InFlight(NamedTuple):
    """A launched step: for the scheduler, on the device, and for the totals."""

    step: Step
    forward: ForwardOutput
    record: StepRecord


class OverlapEngineCore(EngineCore):
    """Launches a step before it books the one before.

    `step` does that, `_add_to_totals` and `_end_all` count a step when it is booked or ended by an error, `_forget_all`
    and `close` first drop the step in flight, and `check_invariants` knows of it.
    """

    def __init__(self, **parts: Any) -> None:
        """`parts`: as m6's."""
        super().__init__(**parts)
        self.late = LateResults(parts["scheduler"])
        self.launcher = Launcher(self.executor.worker, self.scheduler.pools.req_to_token_pool.size)
        self.in_flight: InFlight | None = None
        self.obstacle = obstacle(self.executor, self.scheduler, self.launcher)
        self.tracer.emit(NormalOrder.of, self.obstacle)

    def step(self) -> dict[str, RequestOutput]:
        """Launch the next step, then book the one in flight; return its outputs. Errors are those of m4's step."""
        if self.obstacle is not None:
            return super().step()
        arriving, self.in_flight = self.in_flight, self._launch(self.in_flight)
        outputs = self._book(arriving, self.in_flight)
        if self.in_flight is not None and self._must_arrive(self.in_flight):
            arriving, self.in_flight = self.in_flight, None
            self._arrive(arriving, None)
            outputs |= self._book(arriving, None)
        self._record = BOOKED
        return outputs

    def _must_arrive(self, in_flight: InFlight) -> bool:
        """Return whether a step is booked in the call that launched it: nothing can be launched behind it, or the
        log-probabilities of its prompts are needed before a request of it may be retracted."""
        return bool(in_flight.forward.batch.prompts_to_rate) or self.late.nothing_follows(in_flight.step)

    def _launch(self, arriving: InFlight | None) -> InFlight | None:
        """Schedule the next step, let the one in flight arrive, and launch."""
        record, before = self._record, None if arriving is None else arriving.step
        number = self.tracer.step = self.iteration + (1 if before is None else 2)
        batch = self.late.schedule(before)  # 1 schedule
        record.lap("schedule")
        if arriving is not None:
            self._arrive(arriving, batch)  # 2 arrive
            self.tracer.step, record.lap_began = number, time.perf_counter()
        if batch is None:
            return None
        forward = self._start(batch, record)  # 3 launch
        step = self.late.launched(number, batch)
        self.tracer.emit(StepLaunched.of, forward, None if before is None else before.number)
        record.lap("execute")
        return InFlight(step, forward, record)

    def _start(self, batch: ScheduleBatch, record: StepRecord) -> ForwardOutput:
        """Start the forward of a batch, whose sampling parameters stay as they are now."""
        work: Any = batch.get_model_worker_batch()
        work = replace(work, sampling_info=copy.copy(work.sampling_info))
        record.request_ids, record.num_tokens = work.rids, len(work.input_ids)
        record.num_prompt_tokens = work.num_prompt_tokens
        if work.forward_mode is ForwardMode.PREBUILT:
            return self.launcher.launched(work, self.executor.execute_model(work))
        with_images: Any = self.with_images(work)
        return self.launcher.launch(with_images)

    def _arrive(self, arriving: InFlight, scheduled: ScheduleBatch | None) -> None:
        """Wait for a step, and sample it. `scheduled`: the next batch, which is not launched yet."""
        record, self.tracer.step = arriving.record, arriving.step.number
        record.lap_began = time.perf_counter()
        self.launcher.sample(arriving.forward)
        self.tracer.emit(StepArrived.of, arriving.forward)
        self.late.arrived(arriving.step, arriving.forward.output, scheduled)
        record.lap("execute")

    def _book(self, arrived: InFlight | None, ahead: InFlight | None) -> dict[str, RequestOutput]:
        """Book a step that has arrived, and return its outputs; `ahead`: the one that is in flight now. Without a step
        the requests end that are marked."""
        if arrived is None and ahead is not None and not self.scheduler.marked:
            return {}
        self._record = StepRecord() if arrived is None else arrived.record
        self._record.lap_began = time.perf_counter()
        step = None if arrived is None else arrived.step
        self.tracer.step = self.iteration + 1
        output = self._run_or_fail("execute", self._accept_result, arrived)
        changed = self.late.update(step, output, None if ahead is None else ahead.step)  # 4 update
        outputs = self._make_outputs(self.families.reported(changed))  # 5 make outputs
        super()._add_to_totals(self._record)
        return outputs

    def _accept_result(self, arrived: InFlight) -> ModelRunnerOutput:
        return self._accept(arrived.forward.batch, self.launcher.result(arrived.forward))

    def _add_to_totals(self, record: StepRecord) -> None:
        """Do nothing for a step that is in the totals."""
        if record is not BOOKED:
            super()._add_to_totals(record)

    def _end_all(self, error: Exception) -> dict[str, RequestOutput]:
        """End all requests with an error, in the next step that is not booked."""
        self.tracer.step = self.iteration + 1
        return super()._end_all(error)

    def _forget_all(self, reason: BaseFinishReason) -> None:
        """Drop the step in flight, and end all requests."""
        self.launcher.wait()
        self.in_flight, self.late.ended = None, []
        super()._forget_all(reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if requests and memory contradict each other."""
        self.late.check_invariants(None if self.in_flight is None else self.in_flight.step)

    def close(self) -> None:
        """Drop the step in flight, close as m6's engine core, and end the thread."""
        try:
            super().close()
        finally:
            self.launcher.close()
