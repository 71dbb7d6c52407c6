# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - capitals mark what is known when the kernel is compiled
"""The angles of a step at positions of three axes, as one Triton kernel.

With tensor operations there is a copy of the positions for every pair of a head's values, then a lookup in the cosines
and one in the sines. In one kernel, a program reads each position where it needs it and writes both rows. It runs once
per step; the rotary kernel of m3, which rotates queries and keys in every layer, stays as it is. vLLM and SGLang fuse
the lookup into the rotation, which every layer repeats (`_triton_mrope_forward`, `_triton_mrope_forward_fused`, both
in `layers/rotary_embedding`).
"""

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from torch import Tensor

ELEMENTS = 1024
"""Angles per program, with 4 warps: 8 for each thread."""


@triton.jit(do_not_specialize=["axis_stride", "num_tokens"])  # both change with every step
def mrope_angles_kernel(
    positions_ptr,  # int64 [3, num_tokens], an axis every `axis_stride` elements
    cos_ptr,  # fp32 [num_positions, PAIRS]
    sin_ptr,
    axes_ptr,  # int64 [PAIRS], each 0, 1 or 2
    cos_out_ptr,  # out: fp32 [num_tokens, PAIRS]
    sin_out_ptr,
    axis_stride,
    num_tokens,
    PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """out[token, i] = table[positions[axes[i], token], i]. A program owns BLOCK_TOKENS tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pairs = tl.arange(0, PAIRS_PAD)
    mask = (tokens < num_tokens)[:, None] & (pairs < PAIRS)[None, :]
    axes = tl.load(axes_ptr + pairs, mask=pairs < PAIRS, other=0)
    positions = tl.load(positions_ptr + axes[None, :] * axis_stride + tokens[:, None], mask=mask, other=0)
    rows = positions * PAIRS + pairs[None, :]
    out = tokens[:, None] * PAIRS + pairs[None, :]
    tl.store(cos_out_ptr + out, tl.load(cos_ptr + rows, mask=mask, other=0.0), mask=mask)
    tl.store(sin_out_ptr + out, tl.load(sin_ptr + rows, mask=mask, other=0.0), mask=mask)


def gather_with_triton(positions: Tensor, cos: Tensor, sin: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of `cos` and `sin` `[num_positions, pairs]` at `positions` `[3, num_tokens]`.

    Shape of each: `[num_tokens, pairs]`. `axes` `[pairs]` is the axis whose position each pair reads.
    """
    num_tokens, pairs = positions.shape[1], cos.shape[1]
    assert positions.stride(1) == 1 or num_tokens <= 1
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    assert positions.dtype == axes.dtype == torch.int64
    found = torch.empty((2, num_tokens, pairs), dtype=torch.float32, device=cos.device)
    pairs_pad = triton.next_power_of_2(pairs)
    block_tokens = max(1, ELEMENTS // pairs_pad)
    mrope_angles_kernel[(triton.cdiv(num_tokens, block_tokens),)](
        positions,
        cos,
        sin,
        axes,
        found[0],
        found[1],
        positions.stride(0),
        num_tokens,
        PAIRS=pairs,
        PAIRS_PAD=pairs_pad,
        BLOCK_TOKENS=block_tokens,
    )
    return found[0], found[1]
