"""Every milestone whose steps run on the native kernels leaves a core to the program that uses it."""

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from m3_paged_attention import step_threads
from m3_paged_attention.attention import native_library
from m6_multimodal_pd.multimodal.encoder import Encoder
from tests.events.milestones import MILESTONES
from tests.support.engines import Recorder, greedy

pytestmark = pytest.mark.skipif(native_library.obstacle() is not None, reason="the native kernels cannot run here")


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other programs use more cores than there are; this process has two threads."""
    looks = iter(range(10**6))
    monkeypatch.setattr(step_threads, "PERIOD_S", 1e-9)
    monkeypatch.setattr(step_threads, "read_cpu_times", lambda: step_threads.CPUTimes(busy=1e6 * next(looks), own=0.0))
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def engine_of(milestone: str, backend: str = "native", **parts: Any) -> Any:
    package = importlib.import_module(milestone)
    return package.LLMEngine(
        model_config=package.ModelConfig(device="cpu", dtype="float32", attention_backend=backend), parts=parts
    )


@pytest.mark.parametrize("milestone", MILESTONES[2:])
def test_a_step_beside_other_programs_has_fewer_threads(milestone: str, busy_machine: None) -> None:
    with engine_of(milestone) as engine:
        recorder = Recorder(engine.tracer)
        engine.generate([5, 6, 7], greedy(2))
        (changed,) = recorder.events("threads_changed")
        assert (changed.num_threads, changed.limit) == (1, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("busy_machine")
def test_products_of_torch_keep_their_threads_because_their_last_bits_depend_on_them() -> None:
    counts = []

    class Noting(Encoder):
        def embed(self, seen: Any) -> Any:
            counts.append(torch.get_num_threads())
            return super().embed(seen)

    with engine_of("m3_paged_attention", "torch") as engine:
        recorder = Recorder(engine.tracer)
        engine.generate([5, 6, 7], greedy(2))
        assert not recorder.events("threads_changed")
    with engine_of("m6_multimodal_pd", encoder=Noting) as engine:
        recorder = Recorder(engine.tracer)
        picture = {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)}
        engine.chat([{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}], greedy(2))
        assert [event.num_threads for event in recorder.events("threads_changed")] == [1]
    assert counts == [2]
