"""KV in other formats than the model's: what is stored, and attention over it."""

import pytest
import torch
from torch import Tensor

from m3_paged_attention.kv_dtype import LARGEST, dequantize, quantize
from tests.kernels.references import (
    ATTENTION,
    attend,
    check_attention,
    decode_row,
    in_kv_dtype,
    kv_storage,
    paged_batch,
)

INT8, FP8 = torch.int8, torch.float8_e4m3fn
FORMATS = [pytest.param(torch.bfloat16, id="kv bf16"), pytest.param(INT8, id="kv int8"), pytest.param(FP8, id="kv fp8")]
TOLERANCES = ATTENTION | {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""A 16-bit backend may round a number times its scale, beside its output."""


@pytest.fixture(params=FORMATS)
def kv_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize(("heads", "page"), [((4, 2, 64), 16), ((3, 1, 32), 4), ((2, 2, 128), 5)], ids=str)
def test_attention_over_each_format(backend, device, dtype, kv_dtype, heads, page) -> None:
    """Over the numbers that are stored, as exactly as over the model's own. A query for int8 keys may have 16 bits."""
    batch = paged_batch(
        heads, prefills=[(0, 20), (13, 70)], decodes=[1, 17, 40, 0], dtype=dtype, device=device, page=page
    )
    has_16_bits = backend.name == "native" and kv_dtype == INT8
    check_attention(backend, in_kv_dtype(batch, kv_dtype), TOLERANCES | ({torch.float32: 1e-4} if has_16_bits else {}))


def vectors(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keys `[tokens, 3, 64]` from large to denormal, zeros, and some that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 1e3, 0.0, 1e-30, 1e-44, 1.0, 1.0, 1.0])
    found = torch.randn(9, 3, 64, generator=generator) * sizes[:, None, None]
    found[6, 1, 5], found[7, 1, 63], found[8, 1, 0] = torch.nan, torch.inf, -torch.inf
    return found.to(dtype).to(device)


def codes(stored: Tensor) -> Tensor:
    """Whole numbers in the order of the numbers that are stored; -0 is 0."""
    if stored.dtype == INT8:
        return stored.int()
    bits = stored.view(torch.int8).int()
    return torch.where(bits < 0, -(bits & 127), bits)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_vector_is_stored_within_one_step(backend, device, dtype, kv_dtype, page) -> None:
    """The bytes are those of torch's rounding, or the next; nothing else is written; no NaN or infinity is hidden."""
    batch = paged_batch((3, 3, 64), decodes=[64], dtype=dtype, device=device, page=page)
    storage = kv_storage(batch, kv_dtype)
    layer = storage.layer(0)
    key, slots = vectors(dtype, device), torch.tensor([17, 16, 3, 39, 24, 25, 40, 4, 5], device=device)
    backend.store_kv(key, key.flip(0), layer, slots)
    where = slots // page, slots % page
    for cache, scales, wanted in zip(layer[:2], layer[2:], (key, key.flip(0)), strict=True):
        good = wanted.isfinite().all(-1)
        read = dequantize(cache[where], None if scales is None else scales[where])
        if scales is None:
            torch.testing.assert_close(cache[where], wanted.to(kv_dtype), rtol=0, atol=0, equal_nan=True)
            continue
        stored, of_vectors = quantize(wanted, kv_dtype)
        torch.testing.assert_close(scales[where][good], of_vectors[good], rtol=1e-6, atol=1e-44)
        steps = (codes(cache[where]) - codes(stored)).abs()
        assert steps[good].max() <= 1
        assert (steps[good] > 0).float().mean() < 0.02
        assert not read[~good].isfinite().any() and read[good].isfinite().all()
        step = (0.5 if kv_dtype == INT8 else 16) * wanted[good].float().abs().amax(-1, keepdim=True) / LARGEST[kv_dtype]
        assert ((read[good] - wanted[good].float()).abs() <= 1.01 * step + 1e-37).all()
    rest = torch.ones(storage.blocks.shape[1] * page, dtype=torch.bool, device=device)
    rest[slots] = False
    others = rest.nonzero().flatten()
    for now, then in zip(layer, kv_storage(batch, kv_dtype).layer(0), strict=True):
        if now is not None:
            same = [each[others // page, others % page].contiguous().view(torch.uint8) for each in (now, then)]
            assert torch.equal(*same)


def test_a_row_has_the_same_bits_alone(backend, device, dtype, kv_dtype) -> None:
    if backend.name == "torch" or (backend.name == "native" and dtype == torch.float16):
        return  # the tiles of torch hold several sequences
    batch = in_kv_dtype(paged_batch((4, 2, 64), decodes=[1, 33, 16, 50], dtype=dtype, device=device), kv_dtype)
    together = attend(backend, batch)
    for row in range(4):
        assert torch.equal(attend(backend, decode_row(batch, row))[0], together[row])


def test_a_token_that_is_no_number_is_seen(backend, device, dtype, kv_dtype) -> None:
    for cache in (0, 1):
        batch = paged_batch((2, 2, 64), decodes=[20, 20], dtype=dtype, device=device)
        page = batch.metadata.block_tables[0, 0]
        batch.layer[cache][page, 3, 1, 7] = torch.nan
        result = attend(backend, in_kv_dtype(batch, kv_dtype))
        assert result[0, 1].isnan().any() and result[0, 0].isfinite().all() and result[1].isfinite().all()
