"""A rank's decoder: m3's layers, smaller, over a backend that adds up what the ranks have computed.

What attention and the MLP of a rank return is a part of a sum of all ranks, and the next operation is always a norm of
its sum with the residual. So the all-reduce stands there, in `add_rms_norm`, and the layers have no code for ranks: two
all-reduces in each layer. The embedding is one more, because one rank has the row of a token and the others add zeros.
Logits are gathered on rank 0. So a step has 2 L + 1 all-reduces and one gather, and all ranks have the same hidden
states, to the last bit. vLLM and SGLang reduce in `RowParallelLinear`, and fuse that with the norm where they can.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m6_multimodal_pd.graph_runner import CAPTURABLE, MOST_TOKENS
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder, VisualTokens
from m8_parallel.models.shards import Shard
from m8_parallel.ranks import Ranks


class BackendOfRank:
    """The backend of a rank: m3's, but `add_rms_norm` begins with an all-reduce, and experts may be those of this rank
    alone."""

    def __init__(self, backend: Any, shard: Shard, ranks: Ranks) -> None:
        self.backend, self.shard, self.ranks = backend, shard, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add up the parts `x` of all ranks; return the norm of the sum and `residual`, as m3's backend does."""
        summed: tuple[Tensor, Tensor] = self.backend.add_rms_norm(self.ranks.all_reduce(x), residual, weight, eps)
        return summed

    def experts(self, gate_up: Any, down: Any, num_experts: int) -> Any:
        """Return the experts of a layer: a part of each of them, or this rank's."""
        experts = self.backend.experts(gate_up, down, num_experts)
        if not self.shard.expert_parallel:
            return experts
        local = CapturableExperts if self.backend.name == CAPTURABLE else LocalExperts
        return local(experts, self.shard.first_expert, num_experts)


class LocalExperts:
    """The experts of this rank alone: pairs of a token and another rank's expert are left out."""

    def __init__(self, experts: Any, first: int, count: int) -> None:
        self.experts, self.first, self.count = experts, first, count
        self.gate_up, self.down = experts.gate_up, experts.down

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of the weighted sums."""
        own = experts - self.first
        is_own = (own >= 0) & (own < self.count)
        tokens, _ = is_own.nonzero(as_tuple=True)
        sums = torch.zeros_like(hidden)
        if len(tokens):
            outputs = self.experts(hidden[tokens], own[is_own][:, None], weights[is_own][:, None])
            sums.index_add_(0, tokens, outputs)
        return sums


class CapturableExperts(LocalExperts):
    """`LocalExperts` for captured steps, which may not ask which pairs are left: `__call__` lets the first expert
    compute the others, too, and drops that. Steps of more tokens are not captured."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return this rank's part of the weighted sums."""
        if len(hidden) > MOST_TOKENS:
            return super().__call__(hidden, experts, weights)
        own, top_k = experts - self.first, experts.shape[1]
        is_own = (own >= 0) & (own < self.count)
        chosen = own.where(is_own, 0).view(-1, 1)
        outputs = self.experts(hidden.repeat_interleave(top_k, 0), chosen, weights.reshape(-1, 1))
        sums: Tensor = outputs.where(is_own.view(-1, 1), 0).view(-1, top_k, hidden.shape[1]).sum(1)
        return sums


class RankPart:
    """The two ends of a rank's decoder, where it differs from m3's: the vocabulary is in parts."""

    def __init__(self, shard: Shard, ranks: Ranks) -> None:
        self.shard, self.ranks = shard, ranks

    def join(self, decoder: Decoder) -> None:
        """Give a decoder of this rank's weights the size of the whole vocabulary, and the bytes of one expert."""
        whole, local = self.shard.config, self.shard.local
        decoder.config = replace(local, vocab_size=whole.vocab_size)
        if self.shard.expert_parallel and whole.experts is not None and local.experts is not None:
            # m3 divides by the rows of the router, which are those of all ranks
            decoder.expert_bytes = decoder.expert_bytes * whole.experts.num_experts // local.experts.num_experts

    def embed(self, table: Tensor, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens: a rank has the rows of some, and zeros for the others."""
        rows = self.shard.rows_of_vocabulary()
        own = input_ids - rows.start
        is_own = (own >= 0) & (own < len(rows))
        hidden = functional.embedding(own.where(is_own, 0), table)
        return self.ranks.all_reduce(hidden * is_own[:, None].to(hidden.dtype))

    def gathered(self, own: Tensor, *, is_read: bool) -> Tensor:
        """Return float32 logits `[num_rows, vocab_size]` on rank 0, of this rank's `own` and those of the others; on
        others zeros, because they sample nothing. `is_read`: whether the host reads them at once."""
        vocab_size, own = self.shard.config.vocab_size, own.to(torch.float32)
        parts = self.ranks.gather(own)
        if is_read:
            self.ranks.arrive()
        if not parts:
            return own.new_zeros(1).expand(len(own), vocab_size)
        return torch.cat(parts, 1)[:, :vocab_size]


def layer_by_layer(decoder: Decoder) -> None:
    """Note why the layers run one operation at a time, on the backend that could run them in one call."""
    if decoder.backend.name == "native":
        decoder.eager_reason = "an all-reduce follows the attention and the MLP of each layer"


class ParallelDecoder(Decoder):
    """The decoder of a text model. It changes `embed`, `use_kv` and `compute_logits`."""

    def __init__(self, part: RankPart, *args: Any, **kwargs: Any) -> None:
        """As m3's, of this rank's weights."""
        super().__init__(*args, **kwargs)
        self.part = part
        part.join(self)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.part.embed(self.embedding, input_ids)

    def use_kv(self, kv: KVStorage) -> None:
        layer_by_layer(self)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.part.gathered(self.head(hidden), is_read=True)

    def queue_logits(self, hidden: Tensor) -> Tensor:
        """Return logits as `compute_logits`, which the host may read when the step has arrived."""
        return self.part.gathered(self.head(hidden), is_read=False)


class ParallelVLDecoder(Qwen3VLDecoder):
    """The decoder of a vision-language model. It changes `embed`, `use_kv`, `compute_logits` and `forward`."""

    def __init__(self, part: RankPart, *args: Any, **kwargs: Any) -> None:
        """As m6's, of this rank's weights."""
        super().__init__(*args, **kwargs)
        self.part = part
        part.join(self)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.part.embed(self.embedding, input_ids)

    def use_kv(self, kv: KVStorage) -> None:
        layer_by_layer(self)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.part.gathered(self.head(hidden), is_read=True)

    def queue_logits(self, hidden: Tensor) -> Tensor:
        """Return logits as `compute_logits`, which the host may read when the step has arrived."""
        return self.part.gathered(self.head(hidden), is_read=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVStorage,
        metadata: AttentionMetadata,
        visual: VisualTokens | None = None,
    ) -> Tensor:
        """Return hidden states as in m6. Rank 0 alone adds the DeepStack features, because an all-reduce follows."""
        if visual is not None and not self.part.ranks.is_first:
            embeddings = visual.embeddings.clone()
            embeddings[:, self.config.hidden_size :] = 0
            visual = replace(visual, embeddings=embeddings)
        return super().forward(input_ids, positions, kv, metadata, visual)
