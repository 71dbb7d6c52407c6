"""Which backend is chosen, and what is said when one cannot run."""

import importlib.util
import sys
from typing import Any

import pytest
import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.attention import registry
from m3_paged_attention.attention.registry import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VERSIONS = {"triton": "3.7.1", "numpy": "2.4.6"}


@pytest.fixture(autouse=True)
def a_machine_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, its interpreter is off, and the versions fit."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(monkeypatch, VERSIONS)


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(registry, "version", versions.__getitem__)


def refusal(name: str, device: torch.device) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, device)
    return str(caught.value)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_gets_torch(name: str) -> None:
    assert resolve(name, CPU).name == "torch"


def test_the_interpreter_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("auto", CPU).name == "torch"


def test_a_gpu_gets_triton_unless_told_otherwise() -> None:
    assert registry.choose("auto", CUDA) == "triton"
    assert resolve("torch", CUDA).name == "torch"


def test_a_gpu_without_triton_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    assert resolve("auto", CUDA).name == "torch"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("triton", CPU) == (
        "attention_backend='triton' cannot run here: triton compiles for GPUs and device='cpu' is none "
        "(for tests, TRITON_INTERPRET=1 set before the start runs its kernels in Python)"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "device='cpu' is none" in refusal("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.choose("triton", CPU) == "triton"


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"numpy": "2.4.6"})
    for device in (CPU, CUDA):
        assert "the package triton is not installed" in refusal("triton", device)


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.6.0+git1", "2.10.1", False), ("3.7.1", "2.4.6", True)],
)
def test_an_interpreter_that_its_numpy_breaks_is_refused(
    monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, works: bool
) -> None:
    install(monkeypatch, {"triton": triton, "numpy": numpy})
    assert registry.choose("triton", CUDA) == "triton", "compiled kernels need no numpy"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if works:
        assert registry.choose("triton", CPU) == "triton"
    else:
        message = refusal("triton", CPU)
        assert f"triton {triton} needs numpy < 2.4, and numpy {numpy} is installed" in message


@pytest.mark.parametrize("name", ["Triton", "flash", "", None])
def test_an_unknown_name_is_refused_with_the_known_ones(name: Any) -> None:
    assert refusal(name, CPU) == f"attention_backend={name!r} is unknown: use auto, torch or triton"


def test_every_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [refusal("flash", CPU), refusal("triton", CPU)]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    install(monkeypatch, {"triton": "3.6.0", "numpy": "2.4.0"})
    messages.append(refusal("triton", CPU))
    install(monkeypatch, {})
    messages.append(refusal("triton", CPU))
    assert all("\n" not in message and ". " not in message and len(message) < 220 for message in messages)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_found_without_loading_triton(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [module for module in sys.modules if module.startswith("m3_paged_attention.attention.")]:
        if "registry" not in module:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it would raise
    assert resolve(name, CPU).name == "torch"
    assert not [module for module in sys.modules if module.startswith("m3_paged_attention.attention.triton")]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_backend_asked_for_is_the_backend_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", CPU).name == "triton"
