"""Copies between a device and the host on a stream: with a GPU, and with tensors of the CPU in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from m1_single_request.model_loader import LoadedModel
from m4_radix_cache import LLMEngine, ModelConfig
from m4_radix_cache.mem_cache import host_kv_pool
from m4_radix_cache.mem_cache.host_copies import StreamCopier
from tests.m4_radix_cache.engines import Recorder, Remembered, cache_of, greedy, ids, setting


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded

    def query(self) -> bool:
        return self.is_recorded

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.is_recorded and end.is_recorded
        return 0.5


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: "FakeStream") -> None:
        """All is done at once."""

    def wait_event(self, event: FakeEvent) -> None:
        assert event.is_recorded

    def synchronize(self) -> None:
        """All is done."""


@contextmanager
def fake_context(stream: FakeStream) -> Iterator[None]:
    yield


def check_turns(loaded: LoadedModel, m1: Remembered, **model: Any) -> None:
    """Two prompts push each other out of the device, and come back from the host."""
    config = ModelConfig(model=loaded.name, dtype="float32", **model)
    with LLMEngine(model_config=config, **setting(tokens=64, host_memory_bytes=2**20)) as engine:
        recorder, cache = Recorder(engine.engine_core.tracer), cache_of(engine)
        assert {type(copier) for copier in cache.host.copiers.values()} == {StreamCopier}
        for start in (5, 100, 5, 100):
            prompt = ids(42, start)
            output = engine.generate(prompt, greedy(6))
            assert output.error is None and output.token_ids == m1.generate(prompt, greedy(6)).token_ids
        assert engine.stats().num_host_hit_tokens == 80
        copies = recorder.events("acknowledged")
    assert {copy.direction for copy in copies} == {"write", "load"} and not any(copy.error for copy in copies)


@pytest.mark.parametrize("backend", ["torch", "auto"], ids=["by layer", "in one call"])
def test_pages_that_a_stream_copies_are_those_of_the_device(
    loaded: LoadedModel, m1: Remembered, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    for name, fake in {"Event": FakeEvent, "Stream": FakeStream, "stream": fake_context}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(host_kv_pool, "_copier", StreamCopier)
    check_turns(loaded, m1, device="cpu", attention_backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_kv_comes_back_to_a_gpu(loaded: LoadedModel, m1: Remembered, backend: Any) -> None:
    check_turns(loaded, m1, device="cuda", attention_backend=backend)
