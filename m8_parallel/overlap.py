"""m6's overlapped steps on a rank: every rank launches a step before it books the one before.

Which step is launched behind which is a decision of the host, so all ranks launch the same. The tokens of a step that
the device chooses are those of rank 0: they are broadcast behind the choice, on the device, where the next step reads
them, and once more when they arrive, for the hosts of the other ranks. A part of a step (launch or arrival) ends on no
rank before it has ended on all, so what fails on one of them fails in the same part on all. A step in flight ends with
the same error: its collectives end when the ranks leave their group, and its numbers are wrong.

On CPUs collectives stand between the operations of a step, and its host makes them: steps do not overlap there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.row_sampler import RowSampler
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m6_multimodal_pd.overlap.choice import Choice
from m6_multimodal_pd.overlap.engine_core import InFlight, OverlapEngineCore, UsualParts
from m6_multimodal_pd.overlap.launcher import ForwardOutput, Launcher
from m8_parallel.engine_core import ParallelEngineCore
from m8_parallel.errors import RankLostError
from m8_parallel.messages import to_bytes
from m8_parallel.model_runner import ParallelModelRunner, outcome_of
from m8_parallel.notes import T
from m8_parallel.scheduler import ParallelScheduler


@dataclass(eq=False)
class ChoiceOfRank:
    """The tokens of a step, which rank 0 has chosen."""

    own: Choice | None
    """On rank 0."""
    runner: ParallelModelRunner

    def read(self, sampler: RowSampler, rids: Sequence[str], info: SamplingBatchInfo) -> ModelRunnerOutput:
        """Return the tokens by request, when the step has ended; on all ranks."""
        if self.own is None:
            return self.runner.received(rids)
        output = ModelRunnerOutput(**vars(self.own.read(sampler, rids, info)))
        self.runner.ranks.send_to_all(to_bytes(outcome_of(output)))
        return output


class ParallelLauncher(Launcher):
    """The launcher of a rank. `_run` ends only when it has ended on all ranks (`on_all_ranks`); where no step is in
    flight, it first captures missing graphs. `_choose` is that of rank 0; `wait` and `_wait_for` end if another rank is
    lost."""

    runner_class = ParallelModelRunner

    def __init__(self, *args: Any) -> None:
        """As m6's."""
        super().__init__(*args)
        self._flying: list[ForwardOutput] = []

    def wait(self) -> None:
        """Return when no step runs. If another rank is lost, leave the job, which ends the collectives of the device:
        they would wait for that rank."""
        ranks = self.runner.ranks
        try:
            if self.is_cuda:
                with self.worker.on_device:
                    ranks.wait_for()
        except RankLostError as error:
            ranks.leave(str(error))
        super().wait()

    def _run(self, part: Callable[[ForwardOutput], None], launched: ForwardOutput) -> None:
        if not self._flying:
            self.runner.capture_graphs()
        super()._run(lambda step: self.on_all_ranks(lambda: part(step)), launched)
        self._flying = [each for each in self._flying if each is not launched]
        if launched.error is None and launched.output is None:
            self._flying.append(launched)

    def on_all_ranks(self, part: Callable[[], T]) -> T:
        """Run a part of a step, which ends when it has ended on all ranks. Its error is that of all steps in flight."""
        try:
            result: T = self.runner.on_all_ranks(part)
        except Exception as error:
            for each in self._flying:
                each.error = error
            self._flying = []
            raise
        return result

    def _wait_for(self, event: Any) -> None:
        self.runner.ranks.wait_for(event)

    def _choose(self, hidden: Tensor, sampling: SamplingMetadata) -> tuple[Any, Tensor]:
        ranks, own, logits = self.runner.ranks, None, self.runner.model.queue_logits(hidden)
        if ranks.is_first:
            own, tokens = Choice.queued(self.row_sampler.sampler, logits, sampling)
        else:
            # zeros: if the ranks leave their group before the broadcast, these are read
            tokens = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return ChoiceOfRank(own, self.runner), ranks.broadcast(tokens)


class OverlapParallelEngineCore(ParallelEngineCore, OverlapEngineCore):
    """Both: the engine core of a rank, with one step in flight. `_schedule` also compares decisions, and `_prepared` is
    a part of the step that ends on all ranks, because it writes to the device."""

    usual_parts = UsualParts(scheduler=ParallelScheduler, model_runner=ParallelModelRunner)
    launcher_class = ParallelLauncher

    def __init__(self, **parts: Any) -> None:
        """`parts`: as m6's."""
        super().__init__(**parts)
        if self.launcher is not None:
            self.profiler.settle = self.launcher.wait

    def _schedule(self, before: InFlight | None) -> tuple[ScheduleBatch | None, Any]:
        batch, record = super()._schedule(before)
        self.scheduler.compare(batch)
        return batch, record

    def _prepared(self, batch: ScheduleBatch, before: InFlight | None) -> Any:
        if all(info.is_plain for _, info in self.late.living(batch)):  # their tokens are not counted
            return super()._prepared(batch, before)
        prepared = super()._prepared
        return self.launcher.on_all_ranks(lambda: prepared(batch, before))
