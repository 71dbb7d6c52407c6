"""The stand-in for bfloat16 hardware rounds and multiplies as torch does."""

import numpy as np
import pytest
import torch

from tests.kernels.interpreter_bf16 import narrow, widen

INFINITY = float("inf")
EDGES = [0.0, -0.0, 1.0, 1e-45, 1e-39, 3.4e38, -3.4e38, INFINITY, -INFINITY, float("nan")]
TIES = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20]


@pytest.mark.parametrize("values", [torch.tensor(EDGES), torch.tensor(TIES), torch.randn(1000) * 1e3], ids=len)
def test_a_cast_rounds_to_nearest_even(values) -> None:
    expected = values.to(torch.bfloat16)
    actual = torch.from_numpy(narrow(values.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(actual.view(torch.int16)[finite], expected.view(torch.int16)[finite])


def test_every_bit_pattern_keeps_its_value() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    torch.testing.assert_close(torch.from_numpy(widen(bits)), expected, rtol=0, atol=0, equal_nan=True)
    finite = ~np.isnan(widen(bits))
    assert np.array_equal(narrow(widen(bits))[finite], bits[finite])
