"""The weighted sum of the experts that each token has chosen."""

import random

import pytest
import torch
from torch import Tensor

from tests.kernels import references
from tests.kernels.references import EXPERTS, assert_close


def chosen(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    rng = random.Random(0)
    rows = [rng.sample(range(num_experts), top_k) for _ in range(num_tokens)]
    return torch.tensor(rows, device=device)


def check(backend, device, dtype, experts: Tensor, num_experts: int, hidden_size: int, width: int) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    hidden, weights = drawn(len(experts), hidden_size), drawn(*experts.shape)
    gate_up = drawn(num_experts * 2 * width, hidden_size) * hidden_size**-0.5
    down = drawn(num_experts * hidden_size, width) * width**-0.5
    found = backend.experts(gate_up, down, num_experts)(hidden, experts, weights)
    assert found.dtype == dtype
    assert_close(found, references.experts(hidden, experts, weights, gate_up, down, num_experts), EXPERTS)


@pytest.mark.parametrize(("hidden_size", "width"), [(64, 48), (32, 96), (80, 40)])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 5, 2), (1, 3, 3), (3, 2, 1), (20, 4, 2)])
def test_each_token_gets_the_sum_of_its_experts(
    backend, device, dtype, num_tokens, num_experts, top_k, hidden_size, width
) -> None:
    experts = chosen(num_tokens, num_experts, top_k, device)
    check(backend, device, dtype, experts, num_experts, hidden_size, width)


def test_all_tokens_to_one_expert_and_no_token_to_another(backend, device, dtype) -> None:
    """More pairs than a tile has, of expert 3; none of expert 2."""
    experts = torch.tensor([[3, 1] if token % 2 else [0, 3] for token in range(25)], device=device)
    check(backend, device, dtype, experts, 4, 64, 32)


def test_many_tokens_of_many_experts(backend, device, dtype, kind) -> None:
    if kind == "interpreter":
        num_tokens, num_experts = 40, 9
    else:
        num_tokens, num_experts = 700, 40
    check(backend, device, dtype, chosen(num_tokens, num_experts, 3, device), num_experts, 96, 64)


def test_the_same_numbers_in_every_run(backend, device, dtype) -> None:
    experts = chosen(30, 6, 3, device)
    hidden, weights = torch.randn(30, 64, device=device).to(dtype), torch.rand(30, 3, device=device).to(dtype)
    gate_up, down = (torch.randn(shape, device=device).to(dtype) / 8 for shape in ((6 * 64, 64), (6 * 64, 32)))
    layer = backend.experts(gate_up, down, 6)
    assert torch.equal(layer(hidden, experts, weights), layer(hidden, experts, weights))
