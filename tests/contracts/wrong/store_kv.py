"""Typical mistakes in the kernel that stores KV, each with the hint that it must get."""

# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def stores_the_padding(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Without a mask the beginning of the next slot is written, too."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    tl.store(key_cache_ptr + slot * WIDTH + elements, tl.load(key_ptr + token * key_stride + elements))
    tl.store(value_cache_ptr + slot * WIDTH + elements, tl.load(value_ptr + token * value_stride + elements))


@triton.jit
def padded_slots(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """A slot is taken to be as wide as the vector."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0)
    value = tl.load(value_ptr + token * value_stride + elements, mask=mask, other=0)
    tl.store(key_cache_ptr + slot * WIDTH_PAD + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH_PAD + elements, value, mask=mask)


@triton.jit
def dense_rows(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Tokens are taken to be adjacent."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * WIDTH + elements, mask=mask, other=0)
    value = tl.load(value_ptr + token * WIDTH + elements, mask=mask, other=0)
    tl.store(key_cache_ptr + slot * WIDTH + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, value, mask=mask)


@triton.jit
def one_stride(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """The stride of the keys is used for the values."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0)
    value = tl.load(value_ptr + token * key_stride + elements, mask=mask, other=0)
    tl.store(key_cache_ptr + slot * WIDTH + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, value, mask=mask)


@triton.jit
def first_slot_for_all(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """The first entry of the slot mapping is read by every program, and counted on from there."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = (tl.load(slot_mapping_ptr) + token) % 8
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0)
    value = tl.load(value_ptr + token * value_stride + elements, mask=mask, other=0)
    tl.store(key_cache_ptr + slot * WIDTH + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, value, mask=mask)


@triton.jit
def keys_twice(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """A line was copied and not changed: the keys are in both caches."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0)
    tl.store(key_cache_ptr + slot * WIDTH + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, key, mask=mask)


@triton.jit
def float32_caches(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Whatever the caches have, they are written as float32."""
    token, elements = tl.program_id(0), tl.arange(0, WIDTH_PAD)
    slot = tl.load(slot_mapping_ptr + token)
    mask = elements < WIDTH
    key = tl.load(key_ptr + token * key_stride + elements, mask=mask, other=0).to(tl.float32)
    value = tl.load(value_ptr + token * value_stride + elements, mask=mask, other=0).to(tl.float32)
    key_cache_ptr = key_cache_ptr.to(tl.pointer_type(tl.float32))
    value_cache_ptr = value_cache_ptr.to(tl.pointer_type(tl.float32))
    tl.store(key_cache_ptr + slot * WIDTH + elements, key, mask=mask)
    tl.store(value_cache_ptr + slot * WIDTH + elements, value, mask=mask)


WRONG = [
    (stores_the_padding, "are of the next slot: mask them"),
    (padded_slots, "are of the next slot"),
    (dense_rows, "The stride is from one token to the next"),
    (one_stride, "not `key_stride`"),
    (first_slot_for_all, "its slot is number t of the slot mapping"),
    (float32_caches, "key_cache_ptr.dtype.element_ty"),
    (keys_twice, "a cache each, and the same slot"),
]
