"""Every backend answers as the torch backend does: a model may be given any of them."""

import pytest
import torch

from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.kv_storage import KVLayer
from tests.kernels.references import ATTENTION, NORM, POINTWISE, assert_close, paged_batch

pytestmark = pytest.mark.sample(2)

HEADS = (4, 2, 64)


@pytest.fixture
def reference() -> TorchBackend:
    return TorchBackend()


def both(tolerances: dict[torch.dtype, float]) -> dict[torch.dtype, float]:
    """Each backend may be off by one tolerance."""
    return {dtype: 2 * tolerance for dtype, tolerance in tolerances.items()}


def test_on_attention(backend, reference, device, dtype) -> None:
    batch = paged_batch(HEADS, prefills=[(0, 7), (18, 3)], decodes=[40, 1], dtype=dtype, device=device)
    arguments = (batch.query, batch.layer, batch.metadata, batch.scale)
    assert_close(backend.attention(*arguments), reference.attention(*arguments).double(), both(ATTENTION))


def test_on_stored_kv(backend, reference, device, dtype) -> None:
    key, value = torch.randn(2, 3, 2, 64, device=device).to(dtype)
    slots = torch.tensor([9, 4, 30], device=device)
    ours, theirs = (KVLayer(*torch.zeros(2, 8, 4, 2, 64, dtype=dtype, device=device)) for _ in range(2))
    backend.store_kv(key, value, ours, slots)
    reference.store_kv(key, value, theirs, slots)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_on_norms(backend, reference, device, dtype) -> None:
    x, residual = torch.randn(2, 5, 208, device=device).to(dtype)
    weight = torch.randn(208, device=device).to(dtype)
    assert_close(backend.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6).double(), both(NORM))
    ours = backend.add_rms_norm(x, residual.clone(), weight, 1e-6)
    theirs = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert_close(ours[0], theirs[0].double(), both(NORM))
    assert torch.equal(ours[1], theirs[1])


def test_on_rotary(backend, reference, device, dtype) -> None:
    heads = torch.randn(5, sum(HEADS[:2]), 64, device=device).to(dtype)
    angles = 1000 * torch.rand(5, 32, device=device)
    cos, sin = angles.cos(), angles.sin()
    theirs = reference.rotary(heads.clone(), cos, sin)
    assert_close(backend.rotary(heads, cos, sin), theirs.double(), both(POINTWISE))


def test_on_silu_mul(backend, reference, device, dtype) -> None:
    gate_up = torch.randn(5, 416, device=device).to(dtype)
    theirs = reference.silu_mul(gate_up.clone()).double()
    assert_close(backend.silu_mul(gate_up), theirs, both(POINTWISE))
