"""What every test of kernels wants of torch."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_and_no_luck() -> Iterator[None]:
    """Random numbers repeat, and `torch.empty` returns NaN, so that a read of unwritten memory shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
