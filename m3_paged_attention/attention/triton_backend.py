"""The `triton` backend: checks shapes, and launches the kernels of the modules beside it.

A launch is `kernel[grid](...)`: the grid is the number of programs; the compile-time arguments select the machine code.
All decisions here depend on shapes and types, never on values on the device, so no call waits for the GPU. The kernel
of a row follows from its own number of new tokens: up to `MOST_SPLIT` (decodes, and drafts that are verified) its KV is
split, so that few rows behind long contexts fill a GPU; more are a prefill.

So a step can be captured in a CUDA graph: the grid of split rows is rows x KV heads x splits, and that of prefill
depends on the longest row. Rows of length 0 are valid, and their decode is zeros. Outputs come from torch's caching
allocator; a captured graph keeps its own memory.

`triton_tiles.py` chooses the tiles and the number of splits. vLLM: `v1/attention/backends/triton_attn.py`; SGLang:
`layers/attention/triton_backend.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import ModelDescription
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.triton_attention import join_splits_kernel, paged_decode_kernel, paged_prefill_kernel
from m3_paged_attention.attention.triton_expert_layer import TritonExperts
from m3_paged_attention.attention.triton_pointwise import rms_norm_kernel, rotary_kernel, silu_mul_kernel
from m3_paged_attention.attention.triton_store import store_kv_kernel, store_scaled_kv_kernel
from m3_paged_attention.attention.triton_tiles import (
    MOST_SPLIT,
    multiprocessors,
    num_splits,
    padded_head,
    power_of_two,
    prefill_tile,
    split_tile,
)
from m3_paged_attention.experts import Experts
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_dtype import LARGEST
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.linear import PlainLinear

LOG2_E = math.log2(math.e)
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs whose kernels can convert e4m3."""


class TritonBackend:
    """The backend interface on Triton kernels. It has no state, and runs on the current device."""

    name = "triton"

    def check(self, model: ModelDescription, head_dim: int, kv_dtype: torch.dtype, quantization: str | None) -> None:
        """Raise `ConfigError` for too wide heads, quantized weights, and e4m3 on a GPU that cannot convert it."""
        padded_head(head_dim)
        if quantization is not None:
            raise ConfigError(
                f"quantization={quantization!r} has no kernels in the backend triton, which is the one for GPUs: leave "
                f"it out, or use attention_backend='torch', which saves memory and is slower"
            )
        if kv_dtype == torch.float8_e4m3fn and model.device.type == "cuda":
            capability = torch.cuda.get_device_capability(model.device)
            if capability < FP8_CAPABILITY:
                raise ConfigError(
                    f"kv_cache_dtype='fp8' needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or "
                    f"more, and {model.device} has {'.'.join(map(str, capability))}: use kv_cache_dtype='int8'"
                )

    def linear(self, weight: Weight, bias: Tensor | None = None) -> PlainLinear:
        """Return a layer with the weight unchanged: another layout would not make cuBLAS faster."""
        assert isinstance(weight, Tensor)  # `check`
        return PlainLinear(weight, bias)

    def experts(self, gate_up: Weight, down: Weight, num_experts: int) -> Experts:
        """Return experts with the weights unchanged."""
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)  # `check`
        return TritonExperts(self.silu_mul, gate_up, down, num_experts)

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write the new keys and values `[num_tokens, num_kv_heads, head_dim]` into the slots of `slot_mapping`."""
        (num_tokens, num_kv_heads, head_dim), cache = key.shape, layer.key_cache
        width = num_kv_heads * head_dim
        arguments = _packed(key), _packed(value), *layer[:2], slot_mapping, key.stride(0), value.stride(0)
        if layer.key_scales is None:
            assert cache.is_contiguous() and layer.value_cache.is_contiguous()
            store_kv_kernel[(num_tokens,)](
                *arguments, WIDTH=width, WIDTH_PAD=power_of_two(width), num_warps=_num_warps(width)
            )
            return
        store_scaled_kv_kernel[(num_tokens,)](
            *arguments,
            NUM_KV_HEADS=num_kv_heads,
            HEADS_PAD=power_of_two(num_kv_heads),
            HEAD_DIM=head_dim,
            HEAD_PAD=power_of_two(head_dim),
            PAGE=cache.shape[1],
            LARGEST=LARGEST[cache.dtype],
            IS_INTEGER=not cache.dtype.is_floating_point,
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
            *layer[:2],
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
            HEAD_PAD=padded_head(head_dim),
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
        group, width = num_heads // num_kv_heads, power_of_two(most)
        tile = split_tile(head_dim, group, width, query.dtype, device.type)
        splits = num_splits(len(rows), num_kv_heads, multiprocessors(device))
        partial = torch.empty((len(rows), width, num_heads, splits, head_dim), dtype=query.dtype, device=device)
        lse = torch.empty((len(rows), width, num_heads, splits), dtype=torch.float32, device=device)
        queries = tile.block_m // group  # of a tile
        paged_decode_kernel[(len(rows) * -(-width // queries), num_kv_heads, splits)](
            query,
            *layer[:2],
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
            HEAD_PAD=padded_head(head_dim),
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
            HEAD_PAD=padded_head(head_dim),
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
        block_rows = max(1, 1024 // power_of_two(width))
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
            WIDTH_PAD=power_of_two(width),
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
            HEADS_PAD=power_of_two(num_heads),
            HEAD_DIM=head_dim,
            HALF=half,
            HALF_PAD=power_of_two(half),
            num_warps=_num_warps(num_heads * half),
        )
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute `silu(gate) * up` of the two halves of `[num_tokens, 2 * intermediate]`."""
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1
        block = min(1024, power_of_two(width))
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        silu_mul_kernel[(num_tokens, -(-width // block))](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block)
        return out

    def step(self, model: Any, kv: KVStorage) -> None:
        """Return None: the layers run one operation at a time."""


def _num_warps(elements: int) -> int:
    """Return the number of warps, 1 to 8, of a program that streams `elements` elements: about 8 per thread or more."""
    return min(8, max(1, power_of_two(elements) // 256))


def _packed(x: Tensor) -> Tensor:
    """Return `x` if each token is contiguous: the kernels take one stride, from token to token."""
    assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]), x.stride()
    return x
