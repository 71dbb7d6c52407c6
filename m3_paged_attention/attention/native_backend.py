"""The `native` backend: our own C++ kernels, the fast path on a CPU with a compiler.

It removes three costs that torch has in a decode step. First, torch has no product that reads KV in blocks, so it
copies them; these kernels read the blocks in place. Second, a small model is dominated by calls of a few microseconds;
a norm is one call here and five in torch. Third, a product with few rows mostly reads weights; here they are stored in
the order in which they are read, on huge pages, and quantized ones with half the bytes. The C++ is in `native/`.

vLLM: `v1/attention/backends/cpu_attn.py` over `csrc/cpu`; SGLang: `sgl-kernel/csrc/cpu`; llama.cpp's ggml packs weights
the same way.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import ModelDescription
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.native_experts import NativeExperts
from m3_paged_attention.attention.native_library import PRECISIONS, SIGNATURES, load
from m3_paged_attention.attention.native_linear import NativeLinear
from m3_paged_attention.attention.native_step import NativeStep, kv_type
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.experts import Experts, LinearExperts
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.linear import Linear, plain
from m3_paged_attention.models.architecture import DecoderConfig

LANES = 16  # elements of a vector; widths must be multiples of it


class NativeBackend:
    """C++ kernels, with the torch backend for other precisions and for widths that do not fill vectors."""

    name = "native"

    def __init__(self) -> None:
        """Load the kernels. Raises `NativeUnavailable`; check `native_library.obstacle` first."""
        library = load()
        self._kernels = {
            getattr(torch, precision): SimpleNamespace(
                **{name: getattr(library, f"{name}_{precision}") for name in SIGNATURES}
            )
            for precision in PRECISIONS
        }
        self._torch = TorchBackend()
        self._work: dict[torch.dtype, Tensor] = {}  # of experts

    def check(self, model: ModelDescription, head_dim: int, kv_dtype: torch.dtype, quantization: str | None) -> None:
        """Raise `ConfigError` for quantized weights of a precision without kernels; torch computes all else."""
        if quantization is not None and model.dtype not in self._kernels:
            raise ConfigError(
                f"quantization={quantization!r} has no kernels for {str(model.dtype).removeprefix('torch.')} in the "
                f"backend native: use dtype='bfloat16', or attention_backend='torch', which is slower"
            )

    def computes(self, config: DecoderConfig, dtype: torch.dtype) -> bool:
        """Return whether the C++ kernels compute all matrix products of such a model, and torch none."""
        widths = [config.head_dim % (2 * LANES), config.hidden_size % 2, config.intermediate_size % 2]
        if config.experts is not None:
            widths += [config.hidden_size % LANES, config.experts.intermediate_size % LANES]
        return dtype in self._kernels and not any(widths)

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a layer `y = x W^T + b` with a copy of the weight in panels."""
        kernels = self._kernels.get(weight.dtype)
        if kernels is None or weight.shape[1] % 2:
            return plain(weight, bias)
        assert bias is None or bias.dtype == weight.dtype
        return NativeLinear(kernels, weight, bias)

    def experts(self, gate_up: Weight, down: Weight, num_experts: int) -> Experts:
        """Return experts with a copy of their weights in panels."""
        kernels = self._kernels.get(gate_up.dtype)
        if kernels is None or down.shape[0] // num_experts % LANES or down.shape[1] % LANES:
            return LinearExperts(self, gate_up, down, num_experts)
        return NativeExperts(kernels, gate_up, down, num_experts, self._work)

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write `key` and `value` `[tokens, kv_heads, head_dim]` to the slots of `slot_mapping`."""
        kernels, (num_tokens, kv_heads, head_dim) = self._kernels.get(key.dtype), key.shape
        if kernels is None or (layer.key_cache.dtype != key.dtype and head_dim % (2 * LANES)):
            return self._torch.store_kv(key, value, layer, slot_mapping)
        assert layer.key_cache[0].is_contiguous() and layer.value_cache[0].is_contiguous()
        assert slot_mapping.dtype == torch.int64 and slot_mapping.shape[0] == key.shape[0] == value.shape[0]
        key, value = _dense_tokens(key), _dense_tokens(value)
        where = *layer[:2], slot_mapping, kv_type(layer, key.dtype)
        shape = num_tokens, kv_heads, head_dim, layer.key_cache.shape[1], key.stride(0), value.stride(0)
        kernels.store_kv(key, value, *where, *shape, torch.get_num_threads())

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Compute causal attention over the KV blocks. `[tokens, heads, head_dim]` in and out."""
        kernels, (_, heads, head_dim) = self._kernels.get(query.dtype), query.shape
        if kernels is None or head_dim % (2 * LANES):
            return self._torch.attention(query, layer, metadata, scale)
        assert layer.key_cache[0].is_contiguous() and layer.value_cache[0].is_contiguous()
        caches, kind = layer[:2], kv_type(layer, query.dtype)
        query, output = _dense_tokens(query), query.new_empty(query.shape)
        tables, lengths, first = metadata.block_tables, metadata.seq_lens, metadata.num_prefills
        shape = heads, layer.key_cache.shape[2], head_dim, layer.key_cache.shape[1], query.stride(0), tables.stride(0)
        rest = *shape, scale, torch.get_num_threads()
        if metadata.num_prefills:
            where = tables, metadata.query_start_loc, lengths
            kernels.attend_to_prompts(query, *caches, *where, output, kind, metadata.num_prefills, *rest)
        if metadata.num_decodes:
            query, decoded = query[metadata.num_prefill_tokens :], output[metadata.num_prefill_tokens :]
            of_rows = tables[first:], lengths[first:]
            kernels.attend(query, *caches, *of_rows, decoded, kind, metadata.num_decodes, *rest)
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32."""
        kernels, width = self._kernels.get(x.dtype), x.shape[-1]
        if kernels is None or width % LANES or x.dim() not in (2, 3) or weight.dtype != x.dtype:
            return self._torch.rms_norm(x, weight, eps)
        x = _dense_tokens(x)
        y = x.new_empty(x.shape)
        heads = x.shape[1] if x.dim() == 3 else 1
        shape = x.shape[0], heads, width, x.stride(0)
        kernels.rms_norm(x, weight, y, *shape, weight.dim() == 2, eps, torch.get_num_threads())
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum, which overwrites `residual` where it is contiguous."""
        kernels, (rows, width) = self._kernels.get(x.dtype), x.shape
        if kernels is None or width % LANES or weight.dtype != x.dtype:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        y = x.new_empty(rows, width)
        kernels.add_rms_norm(x, residual, weight, y, rows, width, eps, torch.get_num_threads())
        return y, residual

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head's pairs `(i, i + head_dim / 2)` by the angle of its token, in place."""
        kernels, (num_tokens, num_heads, head_dim) = self._kernels.get(heads.dtype), heads.shape
        if kernels is None or head_dim % (2 * LANES):
            return self._torch.rotary(heads, cos, sin)
        heads, cos, sin = _dense_tokens(heads), cos.contiguous(), sin.contiguous()
        shape = num_tokens, num_heads, head_dim // 2, heads.stride(0)
        kernels.rotary(heads, cos, sin, *shape, torch.get_num_threads())
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute `silu(gate) * up` of `[tokens, 2 * intermediate]`."""
        kernels, (rows, width) = self._kernels.get(gate_up.dtype), gate_up.shape
        width //= 2
        if kernels is None or width % LANES:
            return self._torch.silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(rows, width)
        kernels.silu_mul(gate_up, y, rows, width, torch.get_num_threads())
        return y

    def step(self, model: Any, kv: KVStorage) -> NativeStep | str:
        """Return all layers of a `Decoder` as one call, or the reason why these kernels do not compute all of it."""
        config, dtype = model.config, model.dtype
        if dtype not in self._kernels:
            return f"there are kernels for {' and '.join(PRECISIONS)}, not for {str(dtype).removeprefix('torch.')}"
        for name, width, divisor in (
            ("head_dim", config.head_dim, 2 * LANES),
            ("hidden_size", config.hidden_size, LANES),
            ("intermediate_size", config.intermediate_size, LANES),
        ):
            if width % divisor:
                return f"{name}={width} is no multiple of {divisor}"
        sparse = () if config.experts is None else config.experts.layers
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.attention, layer.mlp
            linears = [attention.qkv_proj, attention.o_proj]
            if index in sparse:
                linears.append(mlp.router)
                if type(mlp.experts) is not NativeExperts:
                    return f"experts are of the class {type(mlp.experts).__name__}, which has no row in the table"
            else:
                linears += [mlp.gate_up_proj, mlp.down_proj]
            odd = [each for each in linears if type(each) is not NativeLinear]
            if odd:
                return f"a linear layer is of the class {type(odd[0]).__name__}, which has no row in the table"
        return NativeStep(self._kernels[dtype].run_layers, model, kv)


def _dense_tokens(x: Tensor) -> Tensor:
    """Return `x` `[tokens, ...]` with contiguous memory within each token; tokens may have any stride."""
    if x.dim() == 3:
        return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
    return x if x.stride(1) == 1 else x.contiguous()
