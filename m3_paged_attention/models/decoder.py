"""The decoder: computes one hidden state per token, and logits for selected hidden states.

m1 and m2 ran transformers' model on a padded batch. From here on the forward pass is ours: one flat row of tokens, KV
in blocks, and a backend for the computation. The same class runs Qwen3, Qwen3-MoE, Qwen2 and Llama.
vLLM: `model_executor/models/llama.py`; SGLang: `models/llama.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_cache_spec import KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.layers import MLP, Attention, DecoderLayer
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.models.rotary import RotaryTable
from m3_paged_attention.models.weights import DecoderWeights

IN_ONE_CALL = (KVStorage, DecoderLayer, Attention, MLP, SparseMLP)
"""Classes, not their subclasses, of all that a backend computes or reads where it runs all layers in one call."""


class Decoder:
    """A decoder-only transformer with a paged KV cache."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        backend: Backend,
        *,
        max_model_len: int,
        kv_dtype: torch.dtype,
    ) -> None:
        """Build the layers one by one, and remove each layer from `weights`. `kv_dtype`: format of the KV.

        So a weight that is copied to another layout is in memory twice only during its own copy.
        """
        self.config, self.backend = config, backend
        self.embedding, self.norm = weights.embedding, weights.norm
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.kv_dtype = kv_dtype
        self.rotary = RotaryTable(config.rope, max_model_len, self.device)
        sizes = [
            (each.gate_up.nbytes + each.down.nbytes) // len(each.router)
            for each in weights.layers
            if each.router is not None
        ]
        self.expert_bytes = sizes[0] if sizes else 0
        """Size of the weights of one expert; 0 without experts."""
        self.layers: list[DecoderLayer] = []
        while weights.layers:
            self.layers.append(DecoderLayer(config, weights.layers.pop(0), backend))
        self.head = backend.linear(weights.head)
        self.eager_reason: str | None = None
        """Reason why the backend's one call does not compute this model; None: it does, or the backend has none."""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of a block of its KV."""
        return KVCacheSpec(
            block_size=block_size,
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.kv_dtype,
        )

    def use_kv(self, kv: KVStorage) -> None:
        """Prepare the steps over `kv`, the engine's KV memory. Call it again after a part of a layer was replaced."""
        parts: list[object] = [kv, *self.layers]
        parts += [part for layer in self.layers if type(layer) is DecoderLayer for part in (layer.attention, layer.mlp)]
        unknown = [type(part).__name__ for part in parts if type(part) not in IN_ONE_CALL]
        found = f"the class {unknown[0]} is not supported" if unknown else self.backend.step(self, kv)
        kv.step, self.eager_reason = (None, found) if isinstance(found, str) else (found, None)

    def forward(self, input_ids: Tensor, positions: Tensor, kv: KVStorage, metadata: AttentionMetadata) -> Tensor:
        """Run the tokens of a step, `input_ids` and `positions` int64 `[num_tokens]`, and write their KV to `kv`.

        Returns the hidden states `[num_tokens, hidden_size]` after the last norm.
        """
        if kv.step is not None and kv.step.takes(metadata):
            return kv.step(input_ids, positions, metadata)
        hidden = self.embed(input_ids)
        cos, sin = self.rotary(positions)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, cos, sin, kv.layer(index), metadata)
        return self.normed(hidden, residual)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, `[num_tokens, hidden_size]`."""
        return functional.embedding(input_ids, self.embedding)

    def normed(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """Return the last norm of the last layer's output and residual, both `[num_tokens, hidden_size]`."""
        assert residual is not None  # a config has at least one layer
        hidden, _ = self.backend.add_rms_norm(hidden, residual, self.norm, self.config.rms_norm_eps)
        return hidden

    def best_tokens(self, hidden: Tensor) -> list[int] | None:
        """Return the token with the largest logit of each row, -1 where a logit is not finite.

        None if the backend has no kernel for it, or `compute_logits` was replaced.
        """
        is_own = getattr(self.compute_logits, "__func__", None) is Decoder.compute_logits
        return self.head.best_tokens(hidden) if is_own and hasattr(self.head, "best_tokens") else None

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits `[num_rows, vocab_size]` of `hidden` `[num_rows, hidden_size]`.

        The result is large: pass only the rows to sample.
        """
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float32 else logits.to(torch.float32)
