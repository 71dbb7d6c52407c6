"""The `native` backend: our own C++ kernels, the fast path on a CPU with a compiler.

It removes three costs that torch has in a decode step. First, torch has no product that reads KV in blocks, so it
copies them; these kernels read the blocks in place. Second, a small model is dominated by calls of a few microseconds;
a norm is one call here and five in torch. Third, a product with few rows mostly reads weights; here they are stored in
the order in which they are read, on huge pages, and quantized ones with half the bytes. The C++ is in `native/`.

vLLM: `v1/attention/backends/cpu_attn.py` over `csrc/cpu`; SGLang: `sgl-kernel/csrc/cpu`; llama.cpp's ggml packs weights
the same way.
"""

import contextlib
import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import ModelDescription
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.native_library import PRECISIONS, SIGNATURES, load
from m3_paged_attention.attention.native_step import NativeStep, kv_type
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m3_paged_attention.linear import Linear, plain
from m3_paged_attention.models.architecture import DecoderConfig

LANES = 16  # elements of a vector; widths must be multiples of it
PANEL = 64  # output features stored together
MOST_KEPT = 2**24  # bytes of logits that a layer keeps for its next call


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

    def check(self, model: ModelDescription, head_dim: int, kv_dtype: torch.dtype, quantization: str | None) -> None:
        """Raise `ConfigError` for quantized weights of a precision without kernels; torch computes all else."""
        if quantization is not None and model.dtype not in self._kernels:
            raise ConfigError(
                f"quantization={quantization!r} has no kernels for {str(model.dtype).removeprefix('torch.')} in the "
                f"backend native: use dtype='bfloat16', or attention_backend='torch', which is slower"
            )

    def computes(self, config: DecoderConfig, dtype: torch.dtype) -> bool:
        """Return whether the C++ kernels compute all matrix products of such a model, and torch none."""
        widths = config.head_dim % (2 * LANES), config.hidden_size % 2, config.intermediate_size % 2
        return dtype in self._kernels and not any(widths)

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a layer `y = x W^T + b` with a copy of the weight in panels."""
        kernels = self._kernels.get(weight.dtype)
        if kernels is None or weight.shape[1] % 2:
            return plain(weight, bias)
        assert bias is None or bias.dtype == weight.dtype
        return NativeLinear(kernels, weight, bias)

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
        for layer in model.layers:
            parts = layer.attention, layer.mlp
            linears = parts[0].qkv_proj, parts[0].o_proj, parts[1].gate_up_proj, parts[1].down_proj
            odd = [each for each in linears if type(each) is not NativeLinear]
            if odd:
                return f"a linear layer is of the class {type(odd[0]).__name__}, which has no row in the table"
        return NativeStep(self._kernels[dtype].run_layers, model, kv)


class NativeLinear:
    """Linear layer of the C++ kernels, with its weight in panels: as it is, or quantized."""

    __slots__ = ("_kernels", "_logits", "_tokens", "bias", "dtype", "in_features", "kind", "out_features", "packed")

    def __init__(self, kernels: SimpleNamespace, weight: Weight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self.out_features, self.in_features = weight.shape
        self.dtype, self.kind = weight.dtype, 0 if isinstance(weight, Tensor) else 1  # `LinearKind` of layers.h
        rows = -(-self.out_features // PANEL) * PANEL
        self.packed = on_huge_pages(rows * weight.nbytes // self.out_features)
        self.bias = None if bias is None else bias.contiguous()
        self._logits, self._tokens = torch.empty(0, dtype=self.dtype), (ctypes.c_long * 0)()
        self.pack(weight)

    def pack(self, weight: Weight) -> None:
        """Write a weight `[out_features, in_features]`, of the same class as the first one, to the panels."""
        tensors = [weight.contiguous()] if isinstance(weight, Tensor) else [weight.values, weight.scales]
        kernel = (self._kernels.pack, self._kernels.pack_int8)[self.kind]
        kernel(*tensors, self.packed, self.in_features, self.out_features, torch.get_num_threads())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the output `[tokens, out_features]` for `hidden` `[tokens, in_features]`."""
        assert hidden.shape[1] == self.in_features and hidden.dtype == self.dtype
        hidden, rows = hidden.contiguous(), hidden.shape[0]
        y = hidden.new_empty(rows, self.out_features)
        shape = rows, self.in_features, self.out_features
        kernel = (self._kernels.linear, self._kernels.linear_int8)[self.kind]
        kernel(hidden, self.packed, self.bias, y, *shape, torch.get_num_threads())
        return y

    def best_tokens(self, hidden: Tensor) -> list[int]:
        """Return the output feature with the largest value of each row; -1 if a value is not finite.

        The memory for a few rows is kept from call to call: to allocate it would take a tenth of a small step.
        """
        assert hidden.shape[1] == self.in_features and hidden.dtype == self.dtype
        hidden, rows = hidden.contiguous(), hidden.shape[0]
        logits, tokens = self._logits, self._tokens
        if rows > len(tokens):
            logits, tokens = hidden.new_empty(rows, self.out_features), (ctypes.c_long * rows)()
            if logits.nbytes <= MOST_KEPT:
                self._logits, self._tokens = logits, tokens
        pointers = hidden.data_ptr(), self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        shape = rows, self.in_features, self.out_features, torch.get_num_threads()
        self._kernels.best_tokens(*pointers, logits.data_ptr(), ctypes.addressof(tokens), self.kind, *shape)
        return tokens[:rows]


def on_huge_pages(num_bytes: int) -> Tensor:
    """Return an uninitialised uint8 tensor `[num_bytes]`, for which Linux uses pages of 2 MiB where it can.

    A core that reads 25 GB in a second needs the address of another page of 4 KiB every 160 nanoseconds. Of huge
    pages there are so few that the core keeps their addresses in its cache, the TLB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _dense_tokens(x: Tensor) -> Tensor:
    """Return `x` `[tokens, ...]` with contiguous memory within each token; tokens may have any stride."""
    if x.dim() == 3:
        return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
    return x if x.stride(1) == 1 else x.contiguous()
