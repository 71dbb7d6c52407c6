"""Build the Triton kernel of m3 that stores the new keys and values of a step in their slots of the KV memory.

A kernel is a program that runs many times at once: here once for each new token. It gets addresses, not tensors, so
whatever you compute from them is read or written, and nobody checks it. Slots of other requests are adjacent to yours.

You need no GPU: on a CPU the kernel runs in Triton's interpreter, as slow Python, where `print` works (`pytest -s`
shows it). You need Linux, for which `pip install -e ".[test]"` brings Triton.

Explained in docs/m3_model.md#the-triton-backend-read-in-place-on-a-gpu.

    cp starters/store_kv.py my_kernel.py
    pytest --part store_kv=my_kernel.py:my_store_kv_kernel
"""

# ruff: noqa: N803 - capitals mark values that are fixed when the kernel is compiled

import triton
import triton.language as tl


@triton.jit
def my_store_kv_kernel(
    key_ptr,  # [num_tokens, WIDTH]
    value_ptr,  # [num_tokens, WIDTH]
    key_cache_ptr,  # [num_slots, WIDTH]
    value_cache_ptr,  # [num_slots, WIDTH]
    slot_mapping_ptr,  # int64 [num_tokens]
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Copy the key and the value of one token to its slot. This program has the token `tl.program_id(0)`.

    A name that ends with `_ptr` is the address of the first element of a tensor, and `ptr + n` that of element n; with
    a vector n it is a vector of addresses. `tl.load(ptr + n, mask=..., other=0)` reads and
    `tl.store(ptr + n, values, mask=...)` writes where the mask is true. `tl.arange(0, n)` is the vector 0 to n - 1, and
    n has to be a power of two.

    - WIDTH: elements of the key, or of the value, of one token: all its heads. WIDTH_PAD: the next power of two.
    - The slot of token t is number t of the slot mapping. Slots are in any order.
    - Keys and values may be views of larger rows: the key of token t begins at element t * key_stride of `key_ptr`, its
      value at element t * value_stride of `value_ptr`. Its WIDTH elements are adjacent.
    - The caches have no gaps: slot s begins at element s * WIDTH. Nothing but the slots of the tokens may change.
    - A cache may have another type than the new numbers, float32, float16 or bfloat16. The type of its elements is
      `key_cache_ptr.dtype.element_ty`; `values.to(type)` converts.
    - Several tokens may have slot 0: padding, in a block that nobody reads. What you write there does not matter.
    """
    raise NotImplementedError
