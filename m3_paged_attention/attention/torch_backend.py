"""The `torch` backend: plain torch, the reference for tests of all kernels, and the fallback on every device.

Torch has no product that reads KV in blocks. So the blocks of a few sequences are copied side by side into scratch
memory, which is reused and stays in the processor's cache, and `scaled_dot_product_attention` reads the copy. The
groups of sequences are planned once per step (`tiles.py`), and every layer uses the plan.

In m2 transformers did all of this, with dense KV. vLLM's CPU backend (`v1/attention/backends/cpu_attn.py`) has C++
kernels that read the blocks in place; SGLang's `torch_native_backend.py` computes one sequence after the other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from m1_single_request.model_loader import ModelDescription
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.tiles import Plan, Prefill, Scratch
from m3_paged_attention.experts import Experts, LinearExperts
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_dtype import quantize
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.linear import Linear, pack, plain

AT_ONCE = 2**17  # elements


class TorchBackend:
    """All operations with few calls of torch: in a small model a call costs more than its arithmetic."""

    name = "torch"

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._plan: Plan | None = None
        self._angles: tuple[Tensor, Tensor, Tensor] | None = None  # a step's cos, and both tables expanded by `rotary`
        self._constants: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}  # of norms

    def check(self, model: ModelDescription, head_dim: int, kv_dtype: torch.dtype, quantization: str | None) -> None:
        """Accept every model."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a layer with the weight in oneDNN's layout if available, else unchanged; so is a quantized one."""
        return (pack(weight, bias) if isinstance(weight, Tensor) else None) or plain(weight, bias)

    def experts(self, gate_up: Weight, down: Weight, num_experts: int) -> Experts:
        """Return experts whose linear layers are those of `linear`."""
        return LinearExperts(self, gate_up, down, num_experts)

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write `key` and `value` `[tokens, kv_heads, head_dim]` to the slots of `slot_mapping`."""
        if layer.key_scales is not None and layer.value_scales is not None:
            block_size = layer.key_cache.shape[1]
            slots = slot_mapping // block_size, slot_mapping % block_size
            layer.key_cache[slots], layer.key_scales[slots] = quantize(key, layer.key_cache.dtype)
            layer.value_cache[slots], layer.value_scales[slots] = quantize(value, layer.value_cache.dtype)
            return
        for cache, new in ((layer.key_cache, key), (layer.value_cache, value)):
            cache.view(-1, *new.shape[1:]).index_copy_(0, slot_mapping, new.to(cache.dtype))

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Compute causal attention: prefills one by one, decodes in tiles. `[tokens, heads, head_dim]` in and out."""
        plan = self._plan
        if plan is None or not plan.is_for(metadata, query, layer):
            plan = self._plan = Plan(metadata, query, layer, self._scratch)
        if plan.is_single:  # no sorting and no copying of rows
            (tile,) = plan.decodes
            keys, values = tile.gather(layer)
            row = query.view(tile.queries.shape)
            attended = scaled_dot_product_attention(row, keys, values, attn_mask=tile.mask, scale=scale)
            return attended.reshape(query.shape)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        for prefill in plan.prefills:
            _attend_to_prompt(prefill, query, layer, scale, output)
        if plan.decodes:
            first = metadata.num_prefill_tokens
            torch.index_select(query[first:], 0, plan.order, out=plan.queries)
            for tile in plan.decodes:
                keys, values = tile.gather(layer)
                # The query heads of one KV head are the rows of one product. One product per head is far slower.
                attended = scaled_dot_product_attention(tile.queries, keys, values, attn_mask=tile.mask, scale=scale)
                tile.attended.copy_(attended)
            output[first:].index_copy_(0, plan.order, plan.attended)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32."""
        if _is_large(x):
            return torch.cat([self.rms_norm(rows, weight, eps) for rows in _in_parts(x)])
        # sqrt(n) times the root is the hypotenuse of norm(x) and sqrt(n * eps): two calls on one number per row, and
        # two on the rows. torch's own rms_norm takes twice the time for a few rows.
        width = x.shape[-1]
        key = width, eps, x.device
        if (constants := self._constants.get(key)) is None:
            small, zero = torch.tensor([(width * eps) ** 0.5, 0.0], device=x.device)
            constants = self._constants[key] = small, zero
        root = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(constants[0])
        return torch.addcmul(constants[1], x / root, weight, value=width**0.5).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum, which overwrites `residual`."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head's pairs `(i, i + head_dim / 2)` by the angle of its token, in float32."""
        if self._angles is None or self._angles[0] is not cos:  # once per step
            both_cos, both_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            self._angles = cos, both_cos[:, None], both_sin[:, None]  # [tokens, 1, head_dim]
        _, both_cos, both_sin = self._angles
        if not _is_large(heads):
            return _rotated(heads, both_cos, both_sin)
        rows = _rows_at_once(heads)
        parts = zip(*(torch.split(tensor, rows) for tensor in (heads, both_cos, both_sin)), strict=True)
        return torch.cat([_rotated(*part) for part in parts])

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute `silu(gate) * up` of `[tokens, 2 * intermediate]`."""
        if _is_large(gate_up):
            return torch.cat([self.silu_mul(rows) for rows in _in_parts(gate_up)])
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    def step(self, model: Any, kv: KVStorage) -> None:
        """Return None: the layers run one operation at a time."""


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = heads.roll(heads.shape[-1] // 2, -1)  # the other element of each pair
    return torch.addcmul(heads * cos, swapped, sin).to(heads.dtype)


def _is_large(x: Tensor) -> bool:
    return x.numel() > AT_ONCE and x.shape[0] > 1


def _in_parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, _rows_at_once(x))


def _rows_at_once(x: Tensor) -> int:
    """Return the number of rows of a large tensor to process at once in a chain of operations.

    Each operation reads the output of the one before. For a whole prompt that float32 output would go through memory;
    for a few rows it stays in the processor's cache.
    """
    return max(1, AT_ONCE // x[0].numel())


def _attend_to_prompt(prefill: Prefill, query: Tensor, layer: KVLayer, scale: float, output: Tensor) -> None:
    """Compute attention of one sequence's new tokens and write it to `output`; without a mask it is plain causal."""
    keys, values = prefill.gather(layer)
    attended = scaled_dot_product_attention(
        query[prefill.tokens].transpose(0, 1)[None],  # [1, heads, new tokens, head_dim]
        keys,
        values,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    output[prefill.tokens] = attended[0].transpose(0, 1)
