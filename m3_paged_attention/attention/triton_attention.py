# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - capitals mark values that are fixed when the kernel is compiled
"""Attention as Triton kernels: KV in pages, softmax in tiles, the score matrix never in memory.

Many programs run a kernel at once; `tl.program_id` selects each program's part of the work. A program addresses memory
with pointers and computes on tiles: small matrices in registers whose sides are powers of two, masked after the end of
the data. A page is a block of the KV cache: the rest of the engine calls it a block, but in a kernel BLOCK is the side
of a tile. Three rules hold in all kernels:

    position n of a sequence  ->  page  block_table[n // PAGE]  ->  slot  page * PAGE + n % PAGE

- A tile of BLOCK_N positions looks up BLOCK_N pages at once, one per position. So the width of a tile is chosen for the
  hardware, independently of the page size, and a page may begin or end anywhere inside a tile.
- Nothing is read after the end of a sequence: neither its block table nor the memory of its last page.
- Arithmetic is fp32 ("ieee": fp32 operands are not rounded to tf32). With a 16-bit model only the operands of a matrix
  product and the stored results are 16 bits wide.

`online_softmax_step` is the same in both attention kernels; they differ in the part of the work of one program.
`triton_store.py` writes the pages. New in this milestone: m2's attention was the one inside transformers. vLLM:
`triton_unified_attention.py` in `attention/ops` (both kernels in one); SGLang: `decode_attention.py` (split KV) and
`extend_attention.py` in `layers/attention/triton_ops`. The splits of decode are FlashDecoding's.
"""

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]


@triton.jit
def load_kv_tile(
    key_cache_ptr,
    value_cache_ptr,
    table_ptr,  # the block table of this sequence
    positions,  # [BLOCK_N]
    end,  # positions from here on are not read
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,  # the type of the queries
):
    """Load the keys and values of BLOCK_N positions from their pages, each [BLOCK_N, HEAD_PAD], as KIND.

    In a format of one byte per number, a page holds its numbers, then a scale for each head and position: fp32
    [NUM_KV_HEADS, PAGE]. Values are multiplied by their scales; those of the keys, [BLOCK_N], are returned for the
    scores.
    """
    inside = positions < end
    page = tl.load(table_ptr + positions // PAGE, mask=inside, other=0).to(tl.int64)
    place = positions % PAGE
    dims = tl.arange(0, HEAD_PAD)
    within = ((place * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    if key_cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        first = page * (PAGE * NUM_KV_HEADS * (HEAD_DIM + 4))
        of_scales = first // 4 + (PAGE * NUM_KV_HEADS * HEAD_DIM // 4) + kv_head * PAGE + place
        key_scale = tl.load(key_cache_ptr.to(tl.pointer_type(tl.float32)) + of_scales, mask=inside, other=0.0)
        value_scale = tl.load(value_cache_ptr.to(tl.pointer_type(tl.float32)) + of_scales, mask=inside, other=0.0)
        key = tl.load(key_cache_ptr + first[:, None] + within, mask=mask, other=0.0).to(tl.float32).to(KIND)
        value = tl.load(value_cache_ptr + first[:, None] + within, mask=mask, other=0.0).to(tl.float32)
        value = (value * value_scale[:, None]).to(KIND)
    else:
        offsets = (page * (PAGE * NUM_KV_HEADS * HEAD_DIM))[:, None] + within
        key_scale = positions  # not used
        key = tl.load(key_cache_ptr + offsets, mask=mask, other=0.0).to(KIND)
        value = tl.load(value_cache_ptr + offsets, mask=mask, other=0.0).to(KIND)
    return key, value, key_scale


@triton.jit
def empty_softmax(ROWS: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return `row_max`, `row_sum` and `acc` of `online_softmax_step` before the first tile."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_PAD], tl.float32)


@triton.jit
def online_softmax_step(scores, value, row_max, row_sum, acc):
    """Add one tile of scores to the softmax. The recurrence of the lesson, with base 2 instead of e.

        scores  [M, N]        this tile's query-key products, in units of log2, -inf where masked
        row_max [M]           the largest score so far, -inf in a row where all were masked
        row_sum [M]           sum of 2**(score - row_max) so far
        acc     [M, HEAD_PAD] sum of the values so far with the same weights, not yet divided by row_sum

    If the maximum grows, the sums so far are scaled by 2**(old - new).
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    finite = tl.where(new_max > float("-inf"), new_max, 0.0)  # -inf - -inf would be NaN
    shrink = tl.exp2(row_max - finite)
    weights = tl.exp2(scores - finite[:, None])
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def attend_to_tiles(
    query,  # [BLOCK_M, HEAD_PAD]
    key_cache_ptr,
    value_cache_ptr,
    table_ptr,
    start,
    end,
    visible,  # [BLOCK_M]: positions from here on are masked
    kv_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run the softmax over the positions from `start` to `end`, tile by tile; return its three values."""
    row_max, row_sum, acc = empty_softmax(BLOCK_M, HEAD_PAD)
    for tile in range(start, end, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        key, value, key_scale = load_kv_tile(
            key_cache_ptr, value_cache_ptr, table_ptr, positions, end, kv_head,
            NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, PAGE, query.dtype,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if key_cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
            scores = scores * key_scale[None, :]
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        row_max, row_sum, acc = online_softmax_step(scores, value, row_max, row_sum, acc)
    return row_max, row_sum, acc


@triton.jit
def new_tokens(query_start_ptr, row, first_row, first_token, WIDTH: tl.constexpr):
    """Return the first new token of a row and their number: 0 for a row of more than WIDTH."""
    if WIDTH == 1:
        start_token = first_token + row
        query_len = start_token - start_token + 1
    else:
        start_token = tl.load(query_start_ptr + first_row + row).to(tl.int64)
        query_len = tl.load(query_start_ptr + first_row + row + 1) - start_token
        query_len = tl.where(query_len > WIDTH, 0, query_len)
    return start_token, query_len.to(tl.int32)


@triton.jit(do_not_specialize=["table_stride", "first_row", "first_token"])
def paged_decode_kernel(
    query_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM], a token every `query_stride` elements
    key_cache_ptr,  # [blocks, PAGE, NUM_KV_HEADS, HEAD_DIM]; of one byte per number: with scales (`load_kv_tile`)
    value_cache_ptr,
    block_tables_ptr,  # [num_seqs, table_stride]
    query_start_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    partial_ptr,  # out: [rows, WIDTH, num_heads, SPLITS, HEAD_DIM]
    lse_ptr,  # out: fp32 [rows, WIDTH, num_heads, SPLITS]
    scale,  # softmax scale * log2(e)
    query_stride,
    table_stride,
    first_row,  # of the rows of this launch
    first_token,  # of their tokens, if each has one
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Decode: 1 to WIDTH new tokens per sequence, whose KV is split. A longer row is left to `paged_prefill_kernel`.

    A program computes one of SPLITS splits for one KV head and QUERIES of the new tokens. The GROUP query heads of each
    are rows of its tile, so that every key and value is read once for all of them. The result is a softmax of its own
    (`partial`) and its log2-sum-exp. The borders of the splits depend only on this sequence's length.
    """
    num_tiles = tl.cdiv(WIDTH, QUERIES)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    rows_of_tile = tl.arange(0, BLOCK_M)
    queries = tl.program_id(0) % num_tiles * QUERIES + rows_of_tile // GROUP
    heads = kv_head * GROUP + rows_of_tile % GROUP
    start_token, query_len = new_tokens(query_start_ptr, row, first_row, first_token, WIDTH)
    valid = (rows_of_tile < QUERIES * GROUP) & (queries < query_len)
    out = ((row * WIDTH + queries) * (NUM_KV_HEADS * GROUP) + heads) * SPLITS + split  # [BLOCK_M]
    seq_len = tl.load(seq_lens_ptr + first_row + row)
    piece = tl.cdiv(tl.cdiv(seq_len, SPLITS), BLOCK_N) * BLOCK_N
    start, end = split * piece, tl.minimum((split + 1) * piece, seq_len)
    if (start >= end) | (query_len == 0):  # the last splits of a short sequence; all of a padding row or a longer one
        tl.store(lse_ptr + out, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
        return
    dims = tl.arange(0, HEAD_PAD)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (start_token + queries)[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    table_ptr = block_tables_ptr + (first_row + row) * table_stride
    visible = tl.minimum(seq_len - query_len + queries + 1, end)  # positions from here on are masked
    row_max, row_sum, acc = attend_to_tiles(
        query, key_cache_ptr, value_cache_ptr, table_ptr, start, end, visible, kv_head, scale,
        NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, PAGE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    total = tl.where(row_sum > 0.0, row_sum, 1.0)  # 0: the split begins behind the token
    partial = (acc / total[:, None]).to(partial_ptr.dtype.element_ty)
    tl.store(partial_ptr + out[:, None] * HEAD_DIM + dims[None, :], partial, mask=mask)
    tl.store(lse_ptr + out, row_max + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["first_row", "first_token"])
def join_splits_kernel(
    partial_ptr,  # [rows, WIDTH, num_heads, SPLITS, HEAD_DIM]
    lse_ptr,  # fp32 [rows, WIDTH, num_heads, SPLITS]
    query_start_ptr,  # [num_seqs + 1]
    out_ptr,  # out: [num_tokens, num_heads, HEAD_DIM]
    first_row,
    first_token,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Join the splits of `paged_decode_kernel`: one program per sequence, new token and query head.

    The weight of a split is proportional to 2**lse, the sum over its positions. An empty split has lse = -inf, weight
    0 and an invalid `partial`. A row of empty splits (padding in a CUDA graph) becomes zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    query, head = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(2)
    start_token, query_len = new_tokens(query_start_ptr, row, first_row, first_token, WIDTH)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_PAD)
    first = ((row * WIDTH + query) * num_heads + head) * SPLITS
    valid = query < query_len
    lse = tl.load(lse_ptr + first + splits, mask=valid, other=float("-inf"))
    filled = lse > float("-inf")
    mask = filled[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (first + splits)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    peak = tl.max(lse, axis=0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)  # -inf - -inf would be NaN
    weights = tl.exp2(lse - peak)
    total = tl.sum(weights, axis=0)
    joined = tl.sum(weights[:, None] * partial.to(tl.float32), axis=0) / tl.where(total > 0.0, total, 1.0)
    out = ((start_token + query) * num_heads + head) * HEAD_DIM + dims
    tl.store(out_ptr + out, joined.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM) & valid)


@triton.jit(do_not_specialize=["table_stride"])
def paged_prefill_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], a token every `query_stride` elements
    key_cache_ptr,  # [blocks, PAGE, NUM_KV_HEADS, HEAD_DIM]; of one byte per number: with scales (`load_kv_tile`)
    value_cache_ptr,
    block_tables_ptr,  # [num_seqs, table_stride]
    query_start_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    out_ptr,  # out: [num_tokens, NUM_HEADS, HEAD_DIM]
    scale,  # softmax scale * log2(e)
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MOST_SPLIT: tl.constexpr,
):
    """Prefill: many new tokens per sequence. A program computes BLOCK_M of one sequence's tokens, for one query head.

    It reads the positions from 0 (of an earlier step, if there is context) to its last query:

        positions   0 ........ context | new tokens
        queries                        | BLOCK_M |        the causal mask applies to the last tiles

    A row with at most MOST_SPLIT new tokens is left to `paged_decode_kernel`.
    """
    tile_m = tl.program_id(0)
    row = tl.program_id(1)
    head = tl.program_id(2)
    first_token = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first_token
    if (tile_m * BLOCK_M >= query_len) | (query_len <= MOST_SPLIT):  # the grid is that of the longest prompt
        return

    seq_len = tl.load(seq_lens_ptr + row)
    queries = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    query_positions = seq_len - query_len + queries
    dims = tl.arange(0, HEAD_PAD)
    mask = (queries < query_len)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + queries).to(tl.int64)
    query_offsets = tokens[:, None] * query_stride + head * HEAD_DIM + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    end = tl.minimum(seq_len - query_len + (tile_m + 1) * BLOCK_M, seq_len)
    _, row_sum, acc = attend_to_tiles(
        query, key_cache_ptr, value_cache_ptr, table_ptr, 0, end, query_positions + 1, kv_head, scale,
        NUM_KV_HEADS, HEAD_DIM, HEAD_PAD, PAGE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_offsets = (tokens * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
