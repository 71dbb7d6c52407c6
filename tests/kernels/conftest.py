"""Every kernel test runs on each kind of kernels: C++ for this processor, Triton in its interpreter on a CPU, and
Triton natively on a GPU (`pytest -m gpu`).

The tests are the same, with the same tolerances. tests/conftest.py takes out what needs a device that this machine
lacks; C++ without a compiler is skipped with the reason.
"""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.registry import Backend

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_interpreter_bf16.py", "test_sm90.py"]  # tests/conftest.py says so in a line

KINDS = [
    "native",
    pytest.param("interpreter", marks=pytest.mark.interpreter),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def same_numbers_and_no_luck() -> Iterator[None]:
    """Random numbers repeat, and `torch.empty` returns NaN, so that reading what nobody wrote shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which kernels, and what runs them."""
    return request.param


@pytest.fixture
def device(kind: str) -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if kind == "gpu" else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The precision of the model."""
    return request.param


@pytest.fixture
def backend(kind: str) -> Backend:
    """The backend under test. In the interpreter, bfloat16 is made to compute as on a GPU."""
    if kind == "native":
        if obstacle := native_library.obstacle():
            pytest.skip(obstacle)
        from m3_paged_attention.attention.native_backend import NativeBackend

        return NativeBackend()
    pytest.importorskip("triton")
    from m3_paged_attention.attention.triton_backend import TritonBackend

    if kind == "interpreter":
        from tests.kernels import interpreter_bf16

        interpreter_bf16.install()
    return TritonBackend()
