# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - capitals mark values that are fixed when the kernel is compiled
"""The experts of a layer as Triton kernels: the pairs of a token and an expert in order, and a product used twice.

A program multiplies a tile of BLOCK_M pairs, so all its pairs must have one expert. `order_by_expert_kernel` writes a
list of pairs, ordered by expert and filled up to whole tiles, and the expert of each tile. `experts_kernel` computes a
product: of hidden states with the gates and ups of their experts, then of what SiLU has made of these with the downs.
All shapes follow from the number of tokens, never from what the router has chosen: a step can be captured in a graph,
and tiles that are not used end at once. vLLM: `moe_align_block_size` and `fused_moe_kernel` in `layers/fused_moe`;
SGLang: `layers/moe/fused_moe_triton`.
"""

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]


@triton.jit(do_not_specialize=["num_pairs"])
def order_by_expert_kernel(
    experts_ptr,  # int64 [num_pairs]: [tokens, top_k], flat
    pairs_ptr,  # out: int32 [tiles * BLOCK_M], the indices of pairs; `num_pairs` where a tile has no more
    tile_experts_ptr,  # out: int32 [tiles]; not written for tiles without a pair
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,  # more than NUM_EXPERTS
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the pairs of one expert, in their order. A program counts those of all, to know where its own begin."""
    expert = tl.program_id(0)
    bins = tl.arange(0, EXPERTS_PAD)
    offsets = tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERTS_PAD], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + offsets
        chosen = tl.load(experts_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS_PAD)
    padded = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, padded, 0), axis=0)
    after = first + tl.sum(tl.where(bins == expert, padded, 0), axis=0)
    end = first
    for start in range(0, num_pairs, CHUNK):
        at = start + offsets
        chosen = tl.load(experts_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS).to(tl.int32)
        is_mine = (chosen == expert).to(tl.int32)
        place = end + tl.cumsum(is_mine, axis=0) - is_mine
        tl.store(pairs_ptr + place, at, mask=is_mine > 0)
        end += tl.sum(is_mine, axis=0)
    rest = end + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + rest, rest * 0 + num_pairs, mask=rest < after)
    for tile in range(first // BLOCK_M, after // BLOCK_M):
        tl.store(tile_experts_ptr + tile, expert)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_kernel(
    x_ptr,  # [num_pairs / TOP_K, IN]
    weight_ptr,  # [experts, OUT, IN]
    scales_ptr,  # [num_pairs], factors of the rows of the result; unused without HAS_SCALES
    pairs_ptr,
    tile_experts_ptr,  # -1: no pair
    out_ptr,  # out: [num_pairs, OUT]
    num_pairs,
    TOP_K: tl.constexpr,  # pairs that read one row of x
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N features of the result of BLOCK_M pairs of one expert. Sums are fp32."""
    tile = tl.program_id(0).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_pair = pairs < num_pairs
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // TOP_K * IN)[:, None] + ks[None, :]
    weight_ptrs = weight_ptr + ((expert * OUT + features) * IN)[None, :] + ks[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = ks < IN - k
        x = tl.load(x_ptrs + k, mask=is_pair[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + k, mask=inside[:, None] & (features < OUT)[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_SCALES:
        acc *= tl.load(scales_ptr + pairs, mask=is_pair, other=0.0).to(tl.float32)[:, None]
    mask = is_pair[:, None] & (features < OUT)[None, :]
    tl.store(out_ptr + (pairs * OUT)[:, None] + features[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
