"""Helpers of m1's engine tests: the ones that all milestones share, and parts that do what a test tells them.

A part of a test is put in with `make_engine({"sampler": scripted([...])})`, as a reader of the course would do it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from m1_single_request import LLMEngine
from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from tests.support.engines import (
    MANY_STEPS as MANY_STEPS,
    MAX_MODEL_LEN as MAX_MODEL_LEN,
    OnEvent as OnEvent,
    Recorder as Recorder,
    drain as drain,
    greedy as greedy,
    held as held,
    unfinished as unfinished,
)


class MakeEngine(Protocol):
    """Builds an engine on the tiny model."""

    def __call__(
        self,
        parts: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_template: str | None = None,
        **configs: Any,
    ) -> LLMEngine: ...


def scripted(token_ids: Iterable[int]) -> type[Sampler]:
    """A sampler that says these tokens, one after the other, whatever the model thinks."""
    script = iter(token_ids)

    class ScriptedSampler(Sampler):
        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
            return SamplerOutput((next(script),), (None,))

    return ScriptedSampler


def failing_runner(error: BaseException, *, rid: str, position: int, after_forward: bool = False) -> type[ModelRunner]:
    """A runner that raises once: when `rid` runs at `position`, before the forward or when its KV is there already."""
    left = [error]

    class FailingRunner(ModelRunner):
        def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]:
            fails = left and inputs.request_id == rid and inputs.num_computed_tokens == position
            if fails and not after_forward:
                raise left.pop()
            logits = super().execute_model(inputs)
            if fails:
                raise left.pop()
            return logits

    return FailingRunner
