"""Which backend is chosen, and what is said when one cannot run."""

import importlib.util
import re
import sys

import pytest
import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.attention import native_library, registry
from m3_paged_attention.attention.registry import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_COMPILER = "there is no C++ compiler (c++, g++, clang++) to compile its kernels with"
HAS_COMPILER = native_library.obstacle() is None


@pytest.fixture(autouse=True)
def a_machine_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, its interpreter is off, and there is a C++ compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(monkeypatch, "triton")
    compile_with(monkeypatch, None)


def compile_with(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> None:
    """Let this be what keeps the native backend from running, or nothing."""
    monkeypatch.setattr(native_library, "obstacle", lambda: obstacle)


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)


def refusal(name: str, device: torch.device) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, device)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "device", "lacking", "chosen"),
    [
        ("auto", CPU, "", "native"),
        ("native", CPU, "", "native"),
        ("torch", CPU, "", "torch"),
        ("auto", CPU, "compiler", "torch"),
        ("auto", CUDA, "", "triton"),
        ("torch", CUDA, "", "torch"),
        ("auto", CUDA, "triton", "torch"),
        ("auto", torch.device("meta"), "", "torch"),
    ],
    ids=str,
)
@pytest.mark.parametrize("interprets", [False, True], ids=["", "interpreter"])
def test_the_fastest_that_the_device_and_the_machine_have_is_chosen(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device, lacking: str, chosen: str, interprets: bool
) -> None:
    """The interpreter is never chosen by itself."""
    if interprets:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if lacking == "compiler":
        compile_with(monkeypatch, NO_COMPILER)
    if lacking == "triton":
        install(monkeypatch)
    assert registry.choose(name, device) == chosen


def test_only_a_cpu_may_have_something_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, and a GPU would never use the result."""
    monkeypatch.setattr(native_library, "obstacle", lambda: pytest.fail("the compiler was asked for"))
    for packages in (["triton"], []):
        install(monkeypatch, *packages)
        registry.choose("auto", CUDA)
    for name in ("torch", "auto"):
        assert registry.choose(name, torch.device("meta")) == "torch"
    assert registry.choose("torch", CPU) == "torch"
    assert "device='cuda' is not a CPU" in refusal("native", CUDA)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("native", CPU, NO_COMPILER),
        ("native", torch.device("cuda:1"), "it runs on CPUs, and device='cuda:1' is not a CPU"),
        ("triton", CPU, "the package triton is not installed"),
        ("triton", CUDA, "the package triton is not installed"),
    ],
    ids=str,
)
def test_a_backend_that_cannot_run_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, device: torch.device, message: str
) -> None:
    compile_with(monkeypatch, NO_COMPILER)
    install(monkeypatch)
    assert refusal(name, device) == f"attention_backend={name!r} cannot run here: {message}"


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
    install(monkeypatch)
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


@pytest.mark.parametrize(
    ("name", "obstacle", "made"),
    [("auto", NO_COMPILER, "torch"), ("torch", None, "torch"), ("auto", None, "native"), ("native", None, "native")],
)
def test_a_backend_is_made_without_loading_another(
    monkeypatch: pytest.MonkeyPatch, name: str, obstacle: str | None, made: str
) -> None:
    if made == "native" and not HAS_COMPILER:
        pytest.skip("no C++ compiler")
    for module in [module for module in sys.modules if re.match(r"m3_paged_attention\.attention\.\w+_backend", module)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "triton", None)  # its import raises
    compile_with(monkeypatch, obstacle)
    assert resolve(name, CPU).name == made
    loaded = {kind for kind in ("native", "triton") if f"m3_paged_attention.attention.{kind}_backend" in sys.modules}
    assert loaded == {made} - {"torch"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_is_made_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", CPU).name == "triton"
