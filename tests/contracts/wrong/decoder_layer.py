"""Typical mistakes in a layer of the decoder, each with the hint that it must get."""

from typing import Any

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.layers import Attention, DecoderLayer
from m3_paged_attention.models.weights import LayerWeights


class NormIsTheResidual(DecoderLayer):
    """The first layer keeps the norm of the embedding, not the embedding."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden = self.backend.rms_norm(hidden, self.input_norm, self.eps)
        return super().__call__(hidden, residual, *rest)


class ForgetsTheOutputBefore(DecoderLayer):
    """A later layer norms the residual alone."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        return super().__call__(hidden if residual is None else residual, None, *rest)


class AddsTheOutput(DecoderLayer):
    """As in a textbook: the output of the MLP is added here, and in the next layer once more."""

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        output, residual = super().__call__(*arguments)
        return output, residual + output


class OneNorm(DecoderLayer):
    """Both norms have the weight of the first one."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        super().__init__(config, weights, backend)
        self.post_attention_norm = self.input_norm


class Parallel(DecoderLayer):
    """The MLP reads the sum before attention's output was added."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        total = hidden if residual is None else hidden + residual
        attended = self.attention(self.backend.rms_norm(total, self.input_norm, self.eps), *rest)
        return self.mlp(self.backend.rms_norm(total, self.post_attention_norm, self.eps)), total + attended


class TrustsItsArgument(DecoderLayer):
    """The sum is taken from where it was given, not from what the backend returned."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        backend, eps = self.backend, self.eps
        if residual is None:
            hidden, residual = backend.rms_norm(hidden, self.input_norm, eps), hidden
        else:
            hidden, residual = backend.add_rms_norm(hidden, residual, self.input_norm, eps)
        hidden = self.attention(hidden, *rest)
        hidden, _ = backend.add_rms_norm(hidden, residual, self.post_attention_norm, eps)
        return self.mlp(hidden), residual


class InParts(Attention):
    """Attention in parts that the mistakes replace."""

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, layer: KVLayer, metadata: AttentionMetadata) -> Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), self.num_heads, self.head_dim)
        query_key, value = self.prepared(qkv, cos, sin)
        query, key = query_key.split_with_sizes(self.heads, 1)
        return self.o_proj(self.attended(query, [key, value], layer, metadata).view(len(hidden), self.out_features))

    def attended(self, query: Tensor, new: list[Tensor], layer: KVLayer, metadata: AttentionMetadata) -> Tensor:
        self.backend.store_kv(*new, layer, metadata.slot_mapping)
        return self.backend.attention(query, layer, metadata, self.scale)

    def prepared(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The heads of Q and K, and those of V."""
        query_key, value = qkv.split_with_sizes(self.qk_and_v, 1)
        return self.turned(self.normed(query_key), cos, sin), value

    def normed(self, query_key: Tensor) -> Tensor:
        return query_key if self.qk_norm is None else self.backend.rms_norm(query_key, self.qk_norm, self.eps)

    def turned(self, query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.backend.rotary(query_key, cos, sin)


def layer_with(attention: type[Attention]) -> type[DecoderLayer]:
    """A layer whose attention has a mistake, with its docstring."""

    class Layer(DecoderLayer):
        def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
            super().__init__(config, weights, backend)
            self.attention = attention(config, weights, backend)

    Layer.__name__, Layer.__doc__ = attention.__name__, attention.__doc__
    return Layer


class ValuesBeforeKeys(InParts):
    """The product is split into queries, values, keys."""

    def prepared(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, value, key = qkv.split_with_sizes([*self.heads, self.heads[1]], 1)
        return self.turned(self.normed(torch.cat([query, key], 1)), cos, sin), value


class KeysAreNotTurned(InParts):
    """Only queries are turned by their positions."""

    def turned(self, query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key = query_key.split_with_sizes(self.heads, 1)
        return torch.cat([self.backend.rotary(query, cos, sin), key], 1)


class TurnedThenNormed(InParts):
    """The norm of the heads comes after the rotary embedding."""

    def prepared(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query_key, value = qkv.split_with_sizes(self.qk_and_v, 1)
        return self.normed(self.turned(query_key, cos, sin)), value


class RotaryInPlace(InParts):
    """The result of `rotary` is not used."""

    def turned(self, query_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.backend.rotary(query_key, cos, sin)
        return query_key


class NoScale(InParts):
    """The scores are not divided by the root of head_dim."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, backend: Backend) -> None:
        super().__init__(config, weights, backend)
        self.scale = 1.0


class AttendsFirst(InParts):
    """The new keys and values are stored after attention has read."""

    def attended(self, query: Tensor, new: list[Tensor], layer: KVLayer, metadata: AttentionMetadata) -> Tensor:
        attended = self.backend.attention(query, layer, metadata, self.scale)
        self.backend.store_kv(*new, layer, metadata.slot_mapping)
        return attended


WRONG = [
    (AddsTheOutput, "The next layer adds the output to the residual"),
    (NormIsTheResidual, "The residual is the sum before the norm"),
    (ForgetsTheOutputBefore, "Nobody has added it yet"),
    (OneNorm, "Each of the two norms has its own weight"),
    (Parallel, "The second norm is that of the sum with attention's output"),
    (TrustsItsArgument, "Use what `add_rms_norm` and `rotary` return"),
    (layer_with(ValuesBeforeKeys), "split it into heads, kv_heads, kv_heads"),
    (layer_with(KeysAreNotTurned), "turns queries and keys, not values"),
    (layer_with(TurnedThenNormed), "First the norm of each head"),
    (layer_with(RotaryInPlace), "turns queries and keys, not values"),
    (layer_with(NoScale), "with `self.scale`"),
    (layer_with(AttendsFirst), "`store_kv` before `attention`"),
]
