"""The `triton` backend: checks shapes, chooses tiles and launches the kernels of the modules beside it.

A launch is `kernel[grid](...)`: the grid is the number of programs; the compile-time arguments select the machine code.
All decisions here depend on shapes and types, never on values on the device, so no call waits for the GPU. The kernel
of a row follows from its own number of new tokens: up to `MOST_SPLIT` (decodes, and drafts that are verified) its KV is
split, so that few rows behind long contexts fill a GPU; more are a prefill.

The number of splits, and so the order of additions, follows from the bucket: the number of rows and of new tokens in
one, each rounded up to a power of two. Within a bucket a request gets the same bits beside any other requests; in
another bucket the last bit may differ, as it may in the matrix products of cuBLAS. It never follows from a length.

So a step can be captured in a CUDA graph: the grid of split rows is rows x KV heads x splits, and that of prefill
depends on the longest row. Rows of length 0 are valid, and their decode is zeros. Outputs come from torch's caching
allocator; a captured graph keeps its own memory.

The tiles were chosen by compiling for Hopper (sm_90) and reading registers, spills and shared memory:
`python -m tests.kernels.compile_for_sm90` prints the table. There is no `@autotune`, because its measured choice could
differ between runs. vLLM: `v1/attention/backends/triton_attn.py`; SGLang: `layers/attention/triton_backend.py`.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.triton_attention import (
    join_splits_kernel,
    paged_decode_kernel,
    paged_prefill_kernel,
    store_kv_kernel,
)
from m3_paged_attention.attention.triton_pointwise import rms_norm_kernel, rotary_kernel, silu_mul_kernel
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.linear import Linear, PlainLinear

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256
MOST_SPLIT = 16
"""Maximum number of new tokens of a row whose KV is split. In a longer row the programs of a prefill are enough."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Number of programs of decode that a multiprocessor runs at once: they wait for memory."""
MOST_SPLITS = 32


class Tile(NamedTuple):
    """Launch parameters of an attention kernel: tile size (queries by keys), warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class TritonBackend:
    """The backend interface on Triton kernels. It has no state, and runs on the current device."""

    name = "triton"

    def check_head_dim(self, head_dim: int) -> None:
        """Raise `ConfigError` if the heads are too wide for the kernels."""
        _padded_head(head_dim)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer with the weight unchanged: another layout would not make cuBLAS faster."""
        return PlainLinear(weight, bias)

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write the new keys and values `[num_tokens, num_kv_heads, head_dim]` into the slots of `slot_mapping`."""
        assert layer.key_cache.is_contiguous() and layer.value_cache.is_contiguous()
        num_tokens = key.shape[0]
        width = key.shape[1] * key.shape[2]
        store_kv_kernel[(num_tokens,)](
            _packed(key),
            _packed(value),
            *layer,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            WIDTH=width,
            WIDTH_PAD=_power_of_two(width),
            num_warps=_num_warps(width),
        )

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Compute causal attention of the new tokens over all KV of their sequences, including their own.

        `query` and the result are `[num_tokens, num_heads, head_dim]`. head_dim is at most 256; the kernels pad it to
        the next power of two.
        """
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if metadata.num_prefills:
            if metadata.max_query_len > MOST_SPLIT:
                self._prefill(_packed(query), layer, metadata, scale, out)
            few = [n for n in metadata.query_lens_host[: metadata.num_prefills] if n <= MOST_SPLIT]
            if few or not metadata.query_lens_host:  # a step that is captured: it will have other lengths
                most = max(few, default=min(metadata.max_query_len, MOST_SPLIT))
                self._split(_packed(query), layer, metadata, scale, out, range(metadata.num_prefills), most)
        if metadata.num_decodes:
            rows = range(metadata.num_prefills, metadata.num_prefills + metadata.num_decodes)
            self._split(_packed(query), layer, metadata, scale, out, rows, 1)
        return out

    def _prefill(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float, out: Tensor) -> None:
        _, num_heads, head_dim = query.shape
        tile = prefill_tile(head_dim, query.dtype, query.device.type)
        num_tiles = -(-metadata.max_query_len // tile.block_m)
        paged_prefill_kernel[(num_tiles, metadata.num_prefills, num_heads)](
            query,
            *layer,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            out,
            scale * LOG2_E,
            query.stride(0),
            metadata.block_tables.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=layer.key_cache.shape[2],
            HEAD_DIM=head_dim,
            HEAD_PAD=_padded_head(head_dim),
            PAGE=layer.key_cache.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            MOST_SPLIT=MOST_SPLIT,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _split(
        self,
        query: Tensor,
        layer: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        out: Tensor,
        rows: range,
        most: int,
    ) -> None:
        """Compute `rows`, with at most `most` new tokens each; rows of more than `MOST_SPLIT` are passed over."""
        (_, num_heads, head_dim), num_kv_heads, device = query.shape, layer.key_cache.shape[2], query.device
        group, width = num_heads // num_kv_heads, _power_of_two(most)
        tile = split_tile(head_dim, group, width, query.dtype, device.type)
        splits = num_splits(len(rows), num_kv_heads, multiprocessors(device))
        partial = torch.empty((len(rows), width, num_heads, splits, head_dim), dtype=query.dtype, device=device)
        lse = torch.empty((len(rows), width, num_heads, splits), dtype=torch.float32, device=device)
        queries = tile.block_m // group  # of a tile
        paged_decode_kernel[(len(rows) * -(-width // queries), num_kv_heads, splits)](
            query,
            *layer,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            partial,
            lse,
            scale * LOG2_E,
            query.stride(0),
            metadata.block_tables.stride(0),
            rows.start,
            metadata.num_prefill_tokens,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            HEAD_PAD=_padded_head(head_dim),
            PAGE=layer.key_cache.shape[1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            QUERIES=queries,
            WIDTH=width,
            SPLITS=splits,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        join_splits_kernel[(len(rows), most, num_heads)](
            partial,
            lse,
            metadata.query_start_loc,
            out,
            rows.start,
            metadata.num_prefill_tokens,
            HEAD_DIM=head_dim,
            HEAD_PAD=_padded_head(head_dim),
            WIDTH=width,
            SPLITS=splits,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute RMSNorm over the last dimension, with one weight for all rows or one per head."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return `(rms_norm(x + residual), x + residual)`. The sum overwrites `residual`, which must be contiguous."""
        assert residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = x.shape[-1]
        tokens = x if x.ndim == 3 else x.reshape(-1, 1, width)  # [num_tokens, heads, width]
        heads, num_rows = tokens.shape[1], tokens.shape[0] * tokens.shape[1]
        block_rows = max(1, 1024 // _power_of_two(width))
        rms_norm_kernel[(-(-num_rows // block_rows),)](
            _packed(tokens),
            out if residual is None else residual,
            weight,
            out,
            eps,
            num_rows,
            tokens.stride(0),
            HEADS=heads,
            WIDTH=width,
            WIDTH_PAD=_power_of_two(width),
            BLOCK_ROWS=block_rows,
            HAS_RESIDUAL=residual is not None,
            PER_HEAD=weight.ndim == 2,
            num_warps=_num_warps(block_rows * width),
        )
        return out

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `heads` `[num_tokens, heads, head_dim]` in place; cos and sin: fp32 `[num_tokens, head_dim / 2]`."""
        num_tokens, num_heads, head_dim = heads.shape
        half = cos.shape[-1]
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
        rotary_kernel[(num_tokens,)](
            _packed(heads),
            cos,
            sin,
            heads.stride(0),
            HEADS=num_heads,
            HEADS_PAD=_power_of_two(num_heads),
            HEAD_DIM=head_dim,
            HALF=half,
            HALF_PAD=_power_of_two(half),
            num_warps=_num_warps(num_heads * half),
        )
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute `silu(gate) * up` of the two halves of `[num_tokens, 2 * intermediate]`."""
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1
        block = min(1024, _power_of_two(width))
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        silu_mul_kernel[(num_tokens, -(-width // block))](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block)
        return out

    def step(self, model: Any, kv: KVStorage) -> None:
        """Return None: the layers run one operation at a time."""


@functools.cache
def prefill_tile(head_dim: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Return the tile of prefill. On a CPU (interpreter) tiles are small, so that short tests use several."""
    head_pad = _padded_head(head_dim)
    if device_type == "cpu":
        return Tile(16, 32, 4, 1)
    if dtype == torch.float32:
        return Tile(32, 16, 8, 1)
    if head_pad <= 64:
        return Tile(64, 64, 4, 3)
    return Tile(128, 64, 8, 2) if head_pad == 128 else Tile(64, 32, 8, 2)


@functools.cache
def split_tile(head_dim: int, group: int, width: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Return the tile of rows whose KV is split. Its rows are the `group` query heads of a KV head, of one or more of
    the `width` new tokens: 16 (one mma) or more, and as many as one program has registers for. On a CPU (interpreter)
    it does not depend on the width, for tests that compare bits."""
    head_pad = _padded_head(head_dim)
    smallest = max(16, _power_of_two(group))
    if device_type == "cpu":
        return Tile(max(smallest, 64), 16, 4, 1)
    if dtype == torch.float32:
        return Tile(smallest, 16, 8, 1)
    rows = max(smallest, min(64, _power_of_two(group * width)))
    return Tile(rows, 64 if head_pad <= 128 else 32, 4, 3 if rows <= 32 else 2)


def num_splits(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return the number of splits of every row: enough that the rows fill the GPU, whatever their lengths are.

    `num_multiprocessors` is 0 on a CPU (interpreter). There it is always the same, for tests that compare bits.
    """
    if not num_multiprocessors:
        return 4
    programs = _power_of_two(num_rows) * num_kv_heads
    return min(MOST_SPLITS, _power_of_two(-(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _padded_head(head_dim: int) -> int:
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"the triton backend has kernels for a head_dim of at most {MAX_HEAD_DIM}, and this model's is {head_dim}: "
            f"use attention_backend='torch'"
        )
    return max(16, _power_of_two(head_dim))  # `tl.dot` needs an inner dimension of at least 16


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n: the sides of a tile are powers of two."""
    return 1 << (n - 1).bit_length()


def _num_warps(elements: int) -> int:
    """Return the number of warps, 1 to 8, of a program that streams `elements` elements: about 8 per thread or more."""
    return min(8, max(1, _power_of_two(elements) // 256))


def _packed(x: Tensor) -> Tensor:
    """Return `x` if each token is contiguous: the kernels take one stride, from token to token."""
    assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]), x.stride()
    return x
