"""The decoder's layers: attention and MLP, with fused linear layers; `qwen3_moe.py` has the MLP of sparse layers.

Q, K and V are one matrix product, and so are gate and up: one large weight is read faster than several small ones, and
on a CPU every call costs microseconds. The backend computes the products and all operations between them. The classes
are plain, because `nn.Module` looks up every attribute in dictionaries, and such overhead dominates a decode step of a
small model. vLLM: `layers/linear.py` (`QKVParallelLinear`, `MergedColumnParallelLinear`); SGLang the same.
"""

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.models.weights import LayerWeights


class Attention:
    """Self-attention of the step's tokens over the KV in their requests' blocks."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        self.backend = backend
        self.qkv_proj = backend.linear(weights.qkv, weights.qkv_bias)
        self.o_proj = backend.linear(weights.o, weights.o_bias)
        self.qk_norm, self.eps = _norm_of_heads(config, weights), config.rms_norm_eps
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        self.heads = [config.num_heads, config.num_kv_heads]  # of Q and K
        self.qk_and_v = [sum(self.heads), config.num_kv_heads]
        self.num_heads, self.out_features = sum(self.qk_and_v), config.num_heads * config.head_dim

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, layer: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """Write the new keys and values to `layer`, then attend. `[num_tokens, hidden_size]` in and out."""
        backend, num_tokens = self.backend, hidden.shape[0]
        qkv = self.qkv_proj(hidden).view(num_tokens, self.num_heads, self.head_dim)
        query_key, value = qkv.split_with_sizes(self.qk_and_v, 1)  # each [num_tokens, its heads, head_dim]
        if self.qk_norm is not None:
            query_key = backend.rms_norm(query_key, self.qk_norm, self.eps)
        query, key = backend.rotary(query_key, cos, sin).split_with_sizes(self.heads, 1)
        backend.store_kv(key, value, layer, metadata.slot_mapping)
        attended = backend.attention(query, layer, metadata, self.scale)  # [num_tokens, num_heads, head_dim]
        return self.o_proj(attended.view(num_tokens, self.out_features))


def _norm_of_heads(config: DecoderConfig, weights: LayerWeights) -> Tensor | None:
    """Return the norm weights of queries and keys, one row per head `[num_heads + num_kv_heads, head_dim]`.

    So one call normalises all heads. None if the architecture has no such norm.
    """
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return torch.stack([weights.q_norm] * config.num_heads + [weights.k_norm] * config.num_kv_heads)


class MLP:
    """The MLP of a layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, weights: LayerWeights, backend: Backend) -> None:
        self.backend = backend
        self.gate_up_proj = backend.linear(weights.gate_up, weights.gate_up_bias)
        self.down_proj = backend.linear(weights.down, weights.down_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the MLP. `[num_tokens, hidden_size]` in and out."""
        return self.down_proj(self.backend.silu_mul(self.gate_up_proj(hidden)))


class DecoderLayer:
    """Attention and MLP, each after a norm, with a separate residual.

    `residual` is the sum of the embedding and all outputs so far. Its norm is the input of attention and of the MLP.
    The backend computes the addition and the norm in one call.
    """

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        self.backend, self.eps = backend, config.rms_norm_eps
        self.input_norm = weights.input_norm
        self.post_attention_norm = weights.post_attention_norm
        self.attention = Attention(config, weights, backend)
        self.mlp: MLP | SparseMLP
        if weights.router is None:
            self.mlp = MLP(weights, backend)
        else:
            assert config.experts is not None
            self.mlp = SparseMLP(config.experts, weights.router, weights.gate_up, weights.down, backend)

    def __call__(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP, and the residual to add it to. Both `[num_tokens, hidden_size]`.

        `hidden` is the MLP output of the layer before; for the first layer it is the embedding, without a residual.
        """
        backend, eps = self.backend, self.eps
        if residual is None:
            hidden, residual = backend.rms_norm(hidden, self.input_norm, eps), hidden
        else:
            hidden, residual = backend.add_rms_norm(hidden, residual, self.input_norm, eps)
        hidden = self.attention(hidden, cos, sin, layer, metadata)
        hidden, residual = backend.add_rms_norm(hidden, residual, self.post_attention_norm, eps)
        return self.mlp(hidden), residual
