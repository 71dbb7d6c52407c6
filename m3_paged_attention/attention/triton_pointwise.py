# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - capitals mark values that are fixed when the kernel is compiled
"""The operations between the matrix products, each as one Triton kernel: RMSNorm, rotary embedding, SiLU times up.

Their cost is memory traffic, not arithmetic: as a chain of tensor operations, each operation reads its input from
memory and writes its output back. A fused kernel reads its rows once, computes in fp32 registers and writes once.
torch (cuBLAS) computes the matrix products. New in this milestone: until m2 transformers did this. vLLM:
`csrc/layernorm_kernels.cu`, `pos_encoding_kernels.cu`, `activation_kernels.cu`; SGLang:
`fused_add_rms_norm_kernel.cu`, `rope.cu`, `activation.cu` in `sgl-kernel/csrc/elementwise`; Liger Kernel has them in
Triton, with their gradients.
"""

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [num_tokens, HEADS, WIDTH], a token every `x_stride` elements
    residual_ptr,  # [num_rows, WIDTH], updated in place; unused without HAS_RESIDUAL
    weight_ptr,  # [WIDTH], or [HEADS, WIDTH] if PER_HEAD
    out_ptr,  # out: [num_rows, WIDTH]
    eps,
    num_rows,  # num_tokens * HEADS
    x_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Compute x / sqrt(mean(x**2) + eps) * weight per row; with a residual, x is x + residual, which is also stored.

    A program computes a tile of BLOCK_ROWS whole rows. The hidden state is one long row per token (HEADS = 1, one row
    per program). Qwen3's norm of queries and keys has a short row per head, so a program computes several. Queries and
    keys have different weights: with one weight row per head (PER_HEAD), one launch computes both.

    The sum is rounded to the residual's type before it is squared, so the norm uses the same values as the next layer.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, WIDTH_PAD)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    x_rows = rows // HEADS * x_stride + rows % HEADS * WIDTH
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets = rows[:, None] * WIDTH + columns[None, :]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / WIDTH
    if PER_HEAD:
        weight_rows = weight_ptr + (rows % HEADS * WIDTH)[:, None] + columns[None, :]
        weight = tl.load(weight_rows, mask=mask, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    normed = x * tl.rsqrt(mean_square + eps)[:, None] * weight
    tl.store(out_ptr + offsets, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    heads_ptr,  # [num_tokens, HEADS, HEAD_DIM], a token every `token_stride` elements; updated in place
    cos_ptr,  # fp32 [num_tokens, HALF]
    sin_ptr,
    token_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Apply rotary position embedding in the half-split layout of Llama and Qwen. A program rotates one token's heads.

    Every pair (x[i], x[i + HALF]) of every head is rotated by the token's angle i. The angles are gathered by position
    once, before the first layer.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HALF_PAD)
    cos = tl.load(cos_ptr + token * HALF + dims, mask=dims < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + dims, mask=dims < HALF, other=0.0)
    mask = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    low_ptr = heads_ptr + token * token_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    high_ptr = low_ptr + HALF
    low = tl.load(low_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(high_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(low_ptr, (low * cos[None, :] - high * sin[None, :]).to(heads_ptr.dtype.element_ty), mask=mask)
    tl.store(high_ptr, (high * cos[None, :] + low * sin[None, :]).to(heads_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * WIDTH]: the gate, then up; a token every `gate_up_stride` elements
    out_ptr,  # out: [num_tokens, WIDTH]
    gate_up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute silu(gate) * up, with silu(x) = x * sigmoid(x). A program computes BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_ptr = gate_up_ptr + token * gate_up_stride + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=mask, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # at most 1, so no value of gate overflows
    sigmoid = tl.where(gate >= 0.0, 1.0, decay) / (1.0 + decay)
    out = gate * sigmoid * up
    tl.store(out_ptr + token * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
