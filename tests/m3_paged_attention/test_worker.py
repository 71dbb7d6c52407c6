"""The worker: whatever it runs, it runs with its own device as the current one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m3_paged_attention.worker import GPUWorker


class CurrentDevice:
    """In the place of `torch.cuda.device`: notes which device is current, on machines without any."""

    now: Any = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        CurrentDevice.now = self.device

    def __exit__(self, *_: object) -> None:
        CurrentDevice.now = None


def worker_on(device: str) -> GPUWorker:
    def execute_model(_: object) -> Any:
        return CurrentDevice.now

    runner: Any = SimpleNamespace(device=torch.device(device), execute_model=execute_model)
    return GPUWorker(model_runner=runner)


def test_steps_run_on_the_worker_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", CurrentDevice)
    output: Any = worker_on("cuda:1").execute_model(None)  # type: ignore[arg-type]
    assert output == torch.device("cuda:1") and CurrentDevice.now is None


def test_on_a_cpu_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", CurrentDevice)
    output: Any = worker_on("cpu").execute_model(None)  # type: ignore[arg-type]
    assert output is None


def test_a_gpu_without_an_index_is_the_one_that_is_current_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert worker_on("cuda").device == torch.device("cuda:1")
    assert worker_on("cuda:0").device == torch.device("cuda:0") and worker_on("cpu").device == torch.device("cpu")
