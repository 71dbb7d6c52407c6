"""Every milestone from m3 on computes all layers of a step in one call of the native kernels, or traces why not."""

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

from m1_single_request.trace_readers import Records
from m3_paged_attention.attention import native_library
from m3_paged_attention.events import EagerSteps
from m3_paged_attention.models.layers import DecoderLayer
from m5_chunked_prefill_spec import SpeculativeConfig
from m6_multimodal_pd import LLMEngine as FullEngine
from tests.events.milestones import MILESTONES
from tests.support.engines import greedy

pytestmark = pytest.mark.skipif(native_library.obstacle() is not None, reason="the native kernels cannot run here")


def engine_of(milestone: str, records: Records, backend: str = "native", **more: Any) -> Any:
    package = importlib.import_module(milestone)
    return package.LLMEngine(
        model_config=package.ModelConfig(device="cpu", dtype="float32", attention_backend=backend),
        trace_config=package.TraceConfig(readers=(records,)),
        **more,
    )


def runner_of(engine: Any) -> Any:
    return engine.engine_core.executor.worker.model_runner


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("milestone", MILESTONES[2:])
def test_only_the_native_backend_has_the_call_and_neither_traces_a_reason(milestone: str, backend: str) -> None:
    records = Records()
    with engine_of(milestone, records, backend) as engine:
        assert (runner_of(engine).kv.step is not None) == (backend == "native")
    assert not records.of(EagerSteps)


@pytest.mark.parametrize("milestone", MILESTONES[2:])
def test_engines_that_share_a_model_have_a_call_each(milestone: str) -> None:
    parts = {"model_loader": functools.cache(importlib.import_module(milestone).LLMEngine.parts["model_loader"])}
    with engine_of(milestone, Records(), parts=parts) as first, engine_of(milestone, Records(), parts=parts) as other:
        assert runner_of(first).model is runner_of(other).model
        steps = [runner_of(each).kv.step for each in (first, other)]
        assert None not in steps and steps[0] is not steps[1]
        other.close()
        assert runner_of(first).kv.step is steps[0]


class OtherLayer(DecoderLayer):
    pass


@pytest.mark.parametrize("milestone", MILESTONES[2:])
def test_a_layer_that_the_call_does_not_know_is_traced_once(milestone: str) -> None:
    load, records = importlib.import_module(milestone).LLMEngine.parts["model_loader"], Records()

    @functools.wraps(load)
    def load_changed(*arguments: Any, **keywords: Any) -> Any:
        loaded = load(*arguments, **keywords)
        loaded.model.layers[0].__class__ = OtherLayer
        return loaded

    with engine_of(milestone, records, parts={"model_loader": load_changed}) as engine:
        assert engine.generate([5, 6, 7], greedy(2)).token_ids
    ((_, event),) = records.of(EagerSteps)
    assert event.reason == "the class OtherLayer is not supported"


def test_a_draft_model_has_the_call_too() -> None:
    with engine_of(
        "m5_chunked_prefill_spec", Records(), speculative_config=SpeculativeConfig(method="draft_model")
    ) as engine:
        draft_runner = runner_of(engine).draft_runner
        assert draft_runner.kv.step.model is draft_runner.model


def test_new_weights_are_read_by_the_same_call() -> None:
    records = Records()
    with engine_of("m6_multimodal_pd", records) as engine:
        runner = runner_of(engine)
        before = runner.kv.step
        engine.update_weights(Path(FullEngine.default_model))
        assert runner.kv.step is before and before.model is runner.model
