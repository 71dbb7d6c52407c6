"""Typical mistakes in paged attention, each with the hint that it must get."""

from typing import Any

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.kv_storage import KVLayer


class RowByRow(TorchBackend):
    """A right solution, in parts that the mistakes replace."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        out, start = torch.zeros_like(query, memory_format=torch.contiguous_format), 0
        for row, (new, length) in enumerate(zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)):
            if length > 0 or not self.skips_padding:
                keys, values = (self.gathered(cache, metadata.block_tables[row], length) for cache in layer[:2])
                out[start : start + new] = self.row(query[start : start + new], keys, values, length, scale)
            start += new
        return out

    skips_padding = True

    def gathered(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        """The keys or values of one row, `[length, kv_heads, head_dim]`."""
        blocks = cache[table[: -(-length // cache.shape[1])].long()]
        return blocks.flatten(0, 1)[:length]

    def row(self, query: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
        keys, values = self.for_heads(keys, query.shape[1]), self.for_heads(values, query.shape[1])
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        weights = self.softmax(scores.masked_fill(self.unseen(len(query), len(keys), length), -torch.inf))
        return torch.einsum("hqk,khd->qhd", weights, values)

    def for_heads(self, kv: Tensor, heads: int) -> Tensor:
        return kv.repeat_interleave(heads // kv.shape[1], 1)

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return torch.ones(new, num_keys, dtype=torch.bool).triu(length - new + 1)

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class AdjacentBlocks(RowByRow):
    """It reads on behind the first block."""

    def gathered(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        first = int(table[0]) * cache.shape[1]
        return cache.flatten(0, 1)[first : first + length]


class WholeBlocks(RowByRow):
    """The last block is read to its end, as if it were full."""

    def gathered(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        return super().gathered(cache, table, -(-length // cache.shape[1]) * cache.shape[1])

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return super().unseen(new, num_keys, num_keys)


class MasksTheScoresOnly(WholeBlocks):
    """Behind the end scores are -inf, but a weight of 0 is still multiplied by what is there."""

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return RowByRow.unseen(self, new, num_keys, length)


class HeadsInTurn(RowByRow):
    """Query heads read the KV heads 0, 1, 0, 1, not 0, 0, 1, 1."""

    def for_heads(self, kv: Tensor, heads: int) -> Tensor:
        return kv.repeat(1, heads // kv.shape[1], 1)


class SeesTheFuture(RowByRow):
    """No mask: a prompt's tokens see all of it."""

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return torch.zeros(new, num_keys, dtype=torch.bool)


class SeesTheBeginning(RowByRow):
    """The mask of a prompt without earlier tokens, used for every row: the first new token sees one token."""

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return super().unseen(new, num_keys, new) if new > 1 else super().unseen(new, num_keys, length)


class PaddingIsComputed(RowByRow):
    """A row of length 0 reads the block 0 of its table."""

    skips_padding = False

    def gathered(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        return super().gathered(cache, table, max(1, length))

    def unseen(self, new: int, num_keys: int, length: int) -> Tensor:
        return super().unseen(new, num_keys, num_keys)


class Overflows(RowByRow):
    """Powers of the scores as they are."""

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


class KeepsTheKV(RowByRow):
    """What was copied for a step is used in all its layers."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        if getattr(self, "step", None) is not metadata:
            self.step, self.kv = metadata, layer
        return super().attention(query, self.kv, metadata, scale)


class CleansTheMemory(RowByRow):
    """It sets the rest of the last block to zero where it is, not in a copy."""

    def gathered(self, cache: Tensor, table: Tensor, length: int) -> Tensor:
        if length % cache.shape[1]:
            cache[table[length // cache.shape[1]], length % cache.shape[1] :] = 0
        return super().gathered(cache, table, length)


class OwnScale(TorchBackend):
    """It divides by the root of head_dim, and does not look at `scale`."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Any:
        return super().attention(query, layer, metadata, query.shape[-1] ** -0.5)


class HeadsFirst(RowByRow):
    """The result is a view of `[heads, tokens, head_dim]`."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        return super().attention(query, layer, metadata, scale).transpose(0, 1).contiguous().transpose(0, 1)


WRONG = [
    (AdjacentBlocks, "look up each of them"),
    (WholeBlocks, "Cut it off, or give it the score -inf"),
    (MasksTheScoresOnly, "A weight of 0 times NaN is NaN"),
    (HeadsInTurn, "heads 0 and 1 read KV head 0"),
    (SeesTheFuture, "the scores of later tokens have to be -inf"),
    (SeesTheBeginning, "The first new token has the position"),
    (PaddingIsComputed, "set these rows to zero"),
    (Overflows, "Subtract the largest score first"),
    (KeepsTheKV, "keys and values are of one layer"),
    (CleansTheMemory, "Change a copy only"),
    (OwnScale, "by the argument `scale`"),
    (HeadsFirst, "return a contiguous tensor"),
]
