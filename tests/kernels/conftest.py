"""Every kernel test runs on each kind of kernels, with the same tolerances.

The kinds are torch, C++ for this processor, Triton in its interpreter on a CPU, and on a GPU (`pytest -m gpu`) Triton
natively and torch. tests/conftest.py takes out those for which this machine has no device; C++ without a compiler is
skipped with the reason.
"""

import importlib.util

import pytest
import torch

from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.attention.torch_backend import TorchBackend
from tests.kernels.numbers import same_numbers_and_no_luck as same_numbers_and_no_luck

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_interpreter_bf16.py", "test_sm90.py"]  # tests/conftest.py says so in a line

TRITON_KINDS = [
    pytest.param("interpreter", marks=[pytest.mark.interpreter, pytest.mark.sample(1)]),  # which takes long
    pytest.param("gpu", marks=pytest.mark.gpu),
]
KINDS = ["torch", "native", *TRITON_KINDS, pytest.param("torch on a gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which kernels, and what runs them."""
    return request.param


@pytest.fixture
def device(kind: str) -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if kind.endswith("gpu") else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The precision of the model."""
    return request.param


@pytest.fixture
def backend(kind: str) -> Backend:
    """The backend under test. In the interpreter, bfloat16 is made to compute as on a GPU."""
    if kind.startswith("torch"):
        return TorchBackend()
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
