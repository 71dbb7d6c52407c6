"""Helpers of the engine's tests: readers of the trace, and parts that do what a test tells them.

A part of a test is put in with `make_engine({"sampler": scripted([...])})`, as a reader of the course would do it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from m1_single_request import LLMEngine, SamplingParams, Tracer, TraceRecord
from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata

MAX_MODEL_LEN = 256
MANY_STEPS = 1000


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


def held(engine: LLMEngine) -> int:
    """Tokens whose KV the runner holds."""
    return engine.engine_core.model_runner.num_kv_tokens()


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """Greedy parameters that only end at their length, unless told otherwise."""
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | params)


def unfinished(engine: LLMEngine) -> Iterator[None]:
    """`for _ in unfinished(engine): engine.step()`, which fails instead of going on for ever."""
    for _ in range(MANY_STEPS):
        if not engine.has_unfinished_requests():
            return
        yield
    raise AssertionError(f"the engine is not done after {MANY_STEPS} steps")


def drain(engine: LLMEngine) -> dict[str, Any]:
    """Step until nothing is left; the last output of every request that `step()` reported."""
    last: dict[str, Any] = {}
    for _ in unfinished(engine):
        outputs = engine.step()
        engine.engine_core.scheduler.check_invariants()
        assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported again after its end"
        last |= outputs
    return last


class Recorder:
    """A trace reader that keeps everything."""

    def __init__(self, tracer: Tracer) -> None:
        self.records: list[TraceRecord] = []
        tracer.attach(self)

    def read(self, record: TraceRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        """Nothing to do."""

    def kinds(self) -> list[str]:
        """The kinds of all events so far."""
        return [record.event.kind for record in self.records]


class OnEvent:
    """A trace reader that acts once: at the `nth` event of `kind` (of request `rid`, if given)."""

    def __init__(
        self, tracer: Tracer, kind: str, action: Callable[[], Any], *, nth: int = 1, rid: str | None = None
    ) -> None:
        self.kind, self.action, self.left, self.rid = kind, action, nth, rid
        self.result: Any = None
        self.error: BaseException | None = None
        tracer.attach(self)

    def read(self, record: TraceRecord) -> None:
        event: Any = record.event
        rids = getattr(event, "rids", (getattr(event, "rid", None),))
        if event.kind != self.kind or (self.rid is not None and self.rid not in rids):
            return
        self.left -= 1
        if self.left == 0:
            try:
                self.result = self.action()
            except Exception as error:
                self.error = error

    def close(self) -> None:
        """Nothing to do."""

    @property
    def acted(self) -> bool:
        return self.left <= 0


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
