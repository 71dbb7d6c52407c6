# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - capitals mark values that are fixed when the kernel is compiled
"""Triton kernels that store new KV in its pages: as it is, or in the formats with scales of `kv_dtype.py`.

`triton_attention.py` reads it, and explains the terms. vLLM: `triton_reshape_and_cache_flash.py` in `attention/ops`.
"""

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from m3_paged_attention.kv_dtype import SMALLEST

SMALLEST_SCALE = tl.constexpr(SMALLEST)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: float32 numbers of this size are whole, so adding it rounds, to even at ties."""


@triton.jit
def store_kv_kernel(
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], a token every `key_stride` elements
    value_ptr,
    key_cache_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [num_tokens]
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,  # elements of one slot: NUM_KV_HEADS * HEAD_DIM
    WIDTH_PAD: tl.constexpr,
):
    """Scatter the new keys and values into their slots. One program copies one token, with all its heads.

    Padding tokens have a slot of block 0, which is never read, so they need no special case.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    elements = tl.arange(0, WIDTH_PAD)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0.0)
    value = tl.load(value_ptr + token * value_stride + elements, mask=mask, other=0.0)
    kind = key_cache_ptr.dtype.element_ty  # the model's, or bfloat16
    tl.store(key_cache_ptr + slot * WIDTH + elements, key.to(kind), mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, value.to(kind), mask=mask)


@triton.jit
def quantized(numbers, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Return fp32 vectors [HEADS_PAD, HEAD_PAD] in units of their scales, and the scales [HEADS_PAD].

    The scale of a vector with NaN or infinity is not finite.
    """
    is_finite = tl.abs(numbers) < float("inf")
    numbers = tl.where(is_finite, numbers, 0.0)
    scale = tl.max(tl.abs(numbers), axis=1) / LARGEST
    is_usual = scale >= SMALLEST_SCALE
    inverse = tl.where(is_usual, 1.0 / tl.where(is_usual, scale, 1.0), 0.0)
    scaled = numbers * inverse[:, None]
    if IS_INTEGER:
        scaled = scaled + ROUND - ROUND
    else:  # to 3 bits of mantissa, below 2**-6 in units of 2**-9; Triton's interpreter would round wrongly in the cast
        bits = scaled.to(tl.int32, bitcast=True)
        large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        scaled = tl.where(tl.abs(scaled) < 0.015625, scaled + ROUND / 512 - ROUND / 512, large)
    return scaled, tl.where(tl.min(is_finite.to(tl.int32), axis=1) > 0, scale, float("nan"))


@triton.jit
def store_scaled_kv_kernel(
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], a token every `key_stride` elements
    value_ptr,
    key_cache_ptr,  # pages of numbers [PAGE, NUM_KV_HEADS, HEAD_DIM] and scales fp32 [NUM_KV_HEADS, PAGE]
    value_cache_ptr,
    slot_mapping_ptr,  # [num_tokens]
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Store the new keys and values in their slots. One program stores one token, with all its heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    page, place = slot // PAGE, slot % PAGE
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HEAD_PAD)
    elements = heads[:, None] * HEAD_DIM + dims[None, :]
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    first = page * (PAGE * NUM_KV_HEADS * (HEAD_DIM + 4))
    to = first + place * (NUM_KV_HEADS * HEAD_DIM) + elements
    to_scales = first // 4 + (PAGE * NUM_KV_HEADS * HEAD_DIM // 4) + heads * PAGE + place
    kind = key_cache_ptr.dtype.element_ty
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0.0).to(tl.float32)
    key, scale = quantized(key, LARGEST, IS_INTEGER)
    tl.store(key_cache_ptr + to, key.to(kind), mask=mask)
    tl.store(key_cache_ptr.to(tl.pointer_type(tl.float32)) + to_scales, scale, mask=heads < NUM_KV_HEADS)
    value = tl.load(value_ptr + token * value_stride + elements, mask=mask, other=0.0).to(tl.float32)
    value, scale = quantized(value, LARGEST, IS_INTEGER)
    tl.store(value_cache_ptr + to, value.to(kind), mask=mask)
    tl.store(value_cache_ptr.to(tl.pointer_type(tl.float32)) + to_scales, scale, mask=heads < NUM_KV_HEADS)
