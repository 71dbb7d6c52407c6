"""What a message shows of a value: one short line, whatever it is."""

from typing import Any

import numpy as np
import pytest
import torch

from m1_single_request.errors import shown
from tests.support.odd_values import ODD


@pytest.mark.parametrize("name", ODD)
def test_any_value_is_shown_in_a_line(name: str) -> None:
    text = shown(ODD[name])
    assert 0 < len(text) <= 80 and "\n" not in text


def test_lists_that_share_lists_are_shown_at_once() -> None:
    shared: Any = []
    for _ in range(200):
        shared = [shared, {"a": shared}]
    assert len(shown(shared)) <= 80


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("a\nb", r"'a\nb'"),
        ("x" * 100, "'" + "x" * 76 + "..."),
        (np.zeros((500, 4), np.float32), "ndarray of float32 and shape (500, 4)"),
        (torch.zeros(2, 3), "Tensor of torch.float32 and shape (2, 3)"),
        (np.array([]), "ndarray of float64 and shape (0,)"),
        (torch.tensor(3), "tensor(3)"),
        (np.int64(3), "np.int64(3)"),
        pytest.param(10**5000, "a number of thousands of digits", id="10**5000"),
    ],
)
def test_a_value_looks_as_python_writes_it_and_an_array_as_its_shape(value: Any, text: str) -> None:
    assert shown(value) == text
