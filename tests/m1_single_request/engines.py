"""Helpers of m1's engine tests: the ones that all milestones share, and parts that do what a test needs.

A part of a test is put in with `make_engine({"sampler": scripted([...])})`, as a reader of the course would do it.
"""

from collections.abc import Iterable

from torch import Tensor

from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from tests.support.engines import (
    MAX_MODEL_LEN as MAX_MODEL_LEN,
    MakeEngine as MakeEngine,
    OnEvent as OnEvent,
    Recorder as Recorder,
    drain as drain,
    greedy as greedy,
    held as held,
    unfinished as unfinished,
)


def scripted(token_ids: Iterable[int]) -> type[Sampler]:
    """A sampler that returns these tokens, one after the other, whatever the logits are."""
    script = iter(token_ids)

    class ScriptedSampler(Sampler):
        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
            return SamplerOutput((next(script),), (None,))

    return ScriptedSampler


def failing_runner(error: BaseException, *, rid: str, position: int) -> type[ModelRunner]:
    """A runner that raises once: when `rid` runs at `position`."""
    left = [error]

    class FailingRunner(ModelRunner):
        def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]:
            if left and inputs.request_id == rid and inputs.num_computed_tokens == position:
                raise left.pop()
            return super().execute_model(inputs)

    return FailingRunner
