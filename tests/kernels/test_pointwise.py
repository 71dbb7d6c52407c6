"""RMSNorm with and without a residual, rotary positions, SiLU times up."""

import pytest
import torch

from tests.kernels import references
from tests.kernels.references import NORM, POINTWISE, assert_close

EPS = 1e-6


@pytest.mark.parametrize(
    "shape", [(5, 200), (5, 208), (1, 64), (3, 1024), (2, 5000), (2, 3, 2, 64), (70,), (64,), (0, 64)], ids=str
)
def test_rms_norm_works_on_the_last_dimension(backend, device, dtype, shape) -> None:
    x = 3 * torch.randn(shape, device=device).to(dtype)
    before, weight = x.clone(), torch.randn(shape[-1], device=device).to(dtype)
    normed = backend.rms_norm(x, weight, EPS)
    assert normed.shape == x.shape and normed.dtype == dtype and torch.equal(x, before)
    if x.numel():
        assert_close(normed, references.rms_norm(x, weight, EPS), NORM)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (7, 3), (5, 16)])
def test_rms_norm_takes_the_heads_of_a_fused_projection(
    backend, device, dtype, head_dim, num_tokens, num_heads
) -> None:
    fused = torch.randn(num_tokens, num_heads + 4, head_dim, device=device).to(dtype)
    query, weight = fused[:, 2 : 2 + num_heads], torch.randn(head_dim, device=device).to(dtype)
    assert_close(backend.rms_norm(query, weight, EPS), references.rms_norm(query, weight, EPS), NORM)
    each = torch.randn(num_heads, head_dim, device=device).to(dtype)  # every head may have a weight of its own
    assert_close(backend.rms_norm(query, each, EPS), references.rms_norm(query, each, EPS), NORM)


def test_rms_norm_of_zeros_is_zero(backend, device, dtype) -> None:
    zeros = torch.zeros(2, 64, dtype=dtype, device=device)
    assert torch.equal(backend.rms_norm(zeros, zeros + 1, EPS), zeros)


@pytest.mark.parametrize("shape", [(5, 200), (5, 208), (1, 1024), (3, 896)], ids=str)
def test_add_rms_norm_keeps_the_sum_as_the_residual(backend, device, dtype, shape) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight, total = torch.randn(shape[-1], device=device).to(dtype), x + residual
    normed, new_residual = backend.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, total)
    assert_close(normed, references.rms_norm(total, weight, EPS), NORM)


def test_add_rms_norm_is_the_sum_and_then_the_norm(backend, device, dtype) -> None:
    """Bitwise: the norm sees the rounded sum, as if the two were separate kernels."""
    x, residual = (torch.randn(6, 256, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(256, device=device).to(dtype)
    apart = backend.rms_norm(x + residual, weight, EPS)
    assert torch.equal(backend.add_rms_norm(x, residual, weight, EPS)[0], apart)


@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 1, 128), (3, 3, 80)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_rotary_turns_queries_and_keys(backend, device, dtype, heads, num_tokens) -> None:
    num_heads, num_kv_heads, head_dim = heads
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    heads, value = fused.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    before = value.clone()
    angles = 1000 * torch.rand(num_tokens, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    expected = references.rotary(heads, cos, sin)
    assert_close(backend.rotary(heads, cos, sin), expected, POINTWISE)
    assert torch.equal(value, before)


@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (5, 208), (3, 4864)], ids=str)
def test_silu_mul_joins_the_halves(backend, device, dtype, shape) -> None:
    num_tokens, width = shape
    gate_up = 4 * torch.randn(num_tokens, 2 * width, device=device).to(dtype)
    assert_close(backend.silu_mul(gate_up), references.silu_mul(gate_up), POINTWISE)


def test_silu_of_large_numbers_stays_finite(backend, device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    assert backend.silu_mul(gate_up).tolist() == [[0.0, 200.0]]
