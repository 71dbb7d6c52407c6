"""The decoder: tokens in, one vector a token out, and logits for those vectors that are asked for.

m1 and m2 ran transformers' model on a padded batch. From here on the forward pass is ours: one flat row of tokens, KV
in blocks, and a backend that computes all the rest. The same class is Qwen3, Qwen2 and Llama.
vLLM: `model_executor/models/llama.py`; SGLang: `models/llama.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.layers import DecoderLayer
from m3_paged_attention.models.rotary import RotaryTable
from m3_paged_attention.models.weights import DecoderWeights


class Decoder:
    """A decoder-only transformer over a paged KV cache."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, backend: Backend, *, max_model_len: int) -> None:
        """Take over `weights`: its layers are emptied one by one.

        A weight that is kept in another layout is thereby there twice for no longer than its own copying takes.
        """
        self.config, self.backend = config, backend
        self.embedding, self.norm = weights.embedding, weights.norm
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.rotary = RotaryTable(config.rope, config.head_dim, max_model_len, self.device)
        self.layers: list[DecoderLayer] = []
        while weights.layers:
            self.layers.append(DecoderLayer(config, weights.layers.pop(0), backend))
        self.head = backend.linear(weights.head)

    def forward(self, input_ids: Tensor, positions: Tensor, kv: KVStorage, metadata: AttentionMetadata) -> Tensor:
        """Run the tokens of a step, `input_ids` and `positions` int64 `[num_tokens]`; their KV is written to `kv`.

        Returns `[num_tokens, hidden_size]`, after the last norm.
        """
        hidden = functional.embedding(input_ids, self.embedding)
        return self.run_layers(hidden, self.rotary(positions), kv, metadata)

    def run_layers(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        kv: KVStorage,
        metadata: AttentionMetadata,
        after_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """From embeddings to what `forward` returns, both `[num_tokens, hidden_size]`.

        `angles` are cosine and sine, each `[num_tokens, head_dim / 2]` and the same for all layers. `after_layer` gets
        the number of a layer and what its MLP adds to the hidden state, and may add more to that in place.
        """
        cos, sin = angles
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, cos, sin, kv.layer(index), metadata)
            if after_layer is not None:
                after_layer(index, hidden)
        assert residual is not None  # a config has at least one layer
        hidden, _ = self.backend.add_rms_norm(hidden, residual, self.norm, self.config.rms_norm_eps)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to float32 `[num_rows, vocab_size]`. Large: give it only the rows you sample."""
        return self.head(hidden).to(torch.float32)
