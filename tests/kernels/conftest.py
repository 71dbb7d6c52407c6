"""Every kernel test runs on each device: in Triton's interpreter on a CPU, natively on a GPU (`pytest -m gpu`).

The tests are the same, with the same tolerances. tests/conftest.py takes out the device that this machine lacks.
"""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from m3_paged_attention.attention.triton_backend import TritonBackend

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # tests/conftest.py says so in a line

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.fixture(autouse=True)
def same_numbers_and_no_luck() -> Iterator[None]:
    """Random numbers repeat, and `torch.empty` returns NaN, so that reading what nobody wrote shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run."""
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The precision of the model."""
    return request.param


@pytest.fixture
def backend(device: torch.device) -> "TritonBackend":
    """The backend under test. In the interpreter, bfloat16 is made to compute as on a GPU."""
    from m3_paged_attention.attention.triton_backend import TritonBackend

    if device.type == "cpu":
        from tests.kernels import interpreter_bf16

        interpreter_bf16.install()
    return TritonBackend()
