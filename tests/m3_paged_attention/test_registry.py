"""Which backend is chosen, and what is said when one cannot run."""

import importlib.util
import sys
from typing import Any

import pytest
import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.attention import native_library, registry
from m3_paged_attention.attention.registry import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VERSIONS = {"triton": "3.7.1", "numpy": "2.4.6"}
NO_COMPILER = "there is no C++ compiler (c++, g++, clang++) to compile its kernels with"
HAS_COMPILER = native_library.obstacle() is None


@pytest.fixture(autouse=True)
def a_machine_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, its interpreter is off, the versions fit, and there is a C++ compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(monkeypatch, VERSIONS)
    compile_with(monkeypatch, None)
    monkeypatch.setattr(registry, "_triton_compiles", lambda: False)


def compile_with(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> None:
    """Let this be what keeps the native backend from running, or nothing."""
    monkeypatch.setattr(native_library, "obstacle", lambda: obstacle)


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(registry, "version", versions.__getitem__)


def refusal(name: str, device: torch.device) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, device)
    return str(caught.value)


def test_a_cpu_gets_native_unless_told_otherwise() -> None:
    assert registry.choose("auto", CPU) == registry.choose("native", CPU) == "native"
    assert resolve("torch", CPU).name == "torch"


def test_a_cpu_without_a_compiler_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, NO_COMPILER)
    assert resolve("auto", CPU).name == "torch"


@pytest.mark.parametrize(("obstacle", "chosen"), [(None, "native"), (NO_COMPILER, "torch")])
def test_the_interpreter_is_never_chosen_by_itself(
    monkeypatch: pytest.MonkeyPatch, obstacle: str | None, chosen: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compile_with(monkeypatch, obstacle)
    assert registry.choose("auto", CPU) == chosen


def test_a_gpu_gets_triton_unless_told_otherwise() -> None:
    assert registry.choose("auto", CUDA) == "triton"
    assert resolve("torch", CUDA).name == "torch"


def test_a_gpu_without_triton_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    assert resolve("auto", CUDA).name == "torch"


def test_only_a_cpu_may_have_something_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, and a GPU would never use the result."""
    monkeypatch.setattr(native_library, "obstacle", lambda: pytest.fail("the compiler was asked for"))
    for versions in (VERSIONS, {}):
        install(monkeypatch, versions)
        registry.choose("auto", CUDA)
    for name in ("torch", "auto"):
        assert registry.choose(name, torch.device("meta")) == "torch"
    assert registry.choose("torch", CPU) == "torch"
    assert "device='cuda' is not a CPU" in refusal("native", CUDA)


def test_native_without_a_compiler_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, NO_COMPILER)
    assert refusal("native", CPU) == f"attention_backend='native' cannot run here: {NO_COMPILER}"


def test_native_on_a_gpu_is_refused() -> None:
    assert refusal("native", torch.device("cuda:1")) == (
        "attention_backend='native' cannot run here: it runs on CPUs, and device='cuda:1' is not a CPU"
    )


@pytest.mark.parametrize(
    ("device", "missing"),
    [(CPU, NO_COMPILER), (CUDA, "the package triton is not installed"), (torch.device("meta"), None)],
    ids=str,
)
def test_what_keeps_auto_from_the_fastest_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, missing: str | None
) -> None:
    assert registry.obstacle_to_best(device) is None
    compile_with(monkeypatch, NO_COMPILER)
    install(monkeypatch, {})
    assert registry.obstacle_to_best(device) == missing
    assert registry.choose("auto", device) == "torch"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("triton", CPU) == (
        "attention_backend='triton' cannot run here: device='cpu' is not a GPU "
        "(for tests, TRITON_INTERPRET=1 runs its kernels in Python)"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "device='cpu' is not a GPU" in refusal("triton", CPU)
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
        assert f"triton {triton} needs numpy < 2.4, not {numpy}" in message


@pytest.mark.parametrize("name", ["Triton", "flash", "", None])
def test_an_unknown_name_is_refused_with_the_known_ones(name: Any) -> None:
    assert refusal(name, CPU) == f"attention_backend={name!r} is unknown: use auto, native, torch or triton"


def test_every_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [refusal("flash", CPU), refusal("triton", CPU), refusal("native", CUDA)]
    compile_with(monkeypatch, NO_COMPILER)
    messages.append(refusal("native", CPU))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    install(monkeypatch, {"triton": "3.6.0", "numpy": "2.4.0"})
    messages.append(refusal("triton", CPU))
    install(monkeypatch, {})
    messages.append(refusal("triton", CPU))
    assert all("\n" not in message and ". " not in message and len(message) < 220 for message in messages)


def forget_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every backend be imported anew, and importing triton raise."""
    for module in [module for module in sys.modules if module.startswith("m3_paged_attention.attention.")]:
        if module.endswith("_backend"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_torch_is_found_without_loading_another(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    forget_backends(monkeypatch)
    compile_with(monkeypatch, NO_COMPILER)
    assert resolve(name, CPU).name == "torch"
    assert "m3_paged_attention.attention.native_backend" not in sys.modules
    assert "m3_paged_attention.attention.triton_backend" not in sys.modules


@pytest.mark.skipif(not HAS_COMPILER, reason=str(native_library.obstacle()))
@pytest.mark.parametrize("name", ["auto", "native"])
def test_native_is_found_without_loading_triton(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    forget_backends(monkeypatch)
    assert resolve(name, CPU).name == "native"
    assert "m3_paged_attention.attention.triton_backend" not in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_backend_asked_for_is_the_backend_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", CPU).name == "triton"
