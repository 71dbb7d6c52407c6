"""Tiles of the torch backend: groups of sequences whose attention is computed in one call.

One call per sequence is too many calls for short sequences. One call for all needs a rectangle as wide as the longest
sequence and a copy of all KV, too large for the processor's cache. A tile is in between: sequences of similar length
side by side, up to `TILE_BYTES`.

    lengths 30 35 38 | 210 240 | 900          three tiles

After the end of a shorter sequence, the copied blocks contain unrelated data. There the scratch memory is set to zero
and the scores are masked, so that the data has no effect, not even a NaN.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_dtype import dequantize
from m3_paged_attention.kv_storage import KVLayer

TILE_BYTES = 2 * 2**20  # maximum keys and values of a tile, padding included
MAX_PADDING = 1.25  # maximum size of a tile, padding included, divided by its tokens
FEW_TOKENS = 16  # without a mask, torch's attention turns NaN into zeros for sequences shorter than its vectors
IN_PLACE_BYTES = 2**19  # maximum KV of a sequence that stays in the processor's cache between steps without a copy


class Scratch:
    """Memory that every tile overwrites; it grows to the largest tile."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of this shape. The next call may return the same memory."""
        size = torch.Size(shape).numel()
        kind = like.dtype, like.device
        if self._buffer is None or self._buffer.numel() < size or (self._buffer.dtype, self._buffer.device) != kind:
            self._buffer = like.new_empty(size)
        return self._buffer[:size].view(shape)


class Gather(NamedTuple):
    """Copies the blocks of a few sequences side by side into scratch memory, in the precision of the queries."""

    block_ids: Tensor  # [num_seqs * blocks per sequence]
    scratch: tuple[Tensor, ...]  # keys and values, each [num_seqs * blocks, block_size, kv_heads, head_dim]
    views: tuple[Tensor, ...]  # of the same memory, each [num_seqs, kv_heads, longest sequence, head_dim]
    tokens: Tensor  # view of the same memory, [2, tokens, kv_heads * head_dim]
    padding: Tensor | None  # indices of the tokens after the end of their sequence

    def __call__(self, layer: KVLayer) -> tuple[Tensor, ...]:
        """Return keys and values `[num_seqs, kv_heads, longest sequence, head_dim]`, valid until the next gather."""
        for target, cache, scales in zip(self.scratch, layer[:2], layer[2:], strict=True):
            if cache.dtype == target.dtype:
                torch.index_select(cache, 0, self.block_ids, out=target)
            else:
                target.copy_(dequantize(cache[self.block_ids], None if scales is None else scales[self.block_ids]))
        if self.padding is not None:
            self.tokens.index_fill_(1, self.padding, 0)
        return self.views


class InPlace(NamedTuple):
    """Reads a sequence in place. Its blocks are adjacent in memory, as those of a request that runs alone can be."""

    shape: tuple[int, int, int, int]  # [1, kv_heads, sequence, head_dim]
    first_block: int

    def __call__(self, layer: KVLayer) -> tuple[Tensor, ...]:
        """Return keys and values as views of that shape."""
        _, num_kv_heads, _, head_dim = self.shape
        strides = (0, head_dim, num_kv_heads * head_dim, 1)
        return tuple(  # one call instead of four that slice, flatten and transpose
            cache.as_strided(self.shape, strides, cache.storage_offset() + self.first_block * cache.stride(0))
            for cache in layer[:2]
        )


class Prefill(NamedTuple):
    """The new tokens of one sequence."""

    gather: Gather
    tokens: slice
    mask: Tensor | None  # [new tokens, sequence], added to the scores; None: the whole sequence is new, and not short


class DecodeTile(NamedTuple):
    """The decode tokens of a few sequences of similar length."""

    gather: Gather | InPlace
    mask: Tensor | None  # [num_seqs, 1, 1, longest sequence], added to the scores; None: equal lengths, not short
    queries: Tensor  # [num_seqs, kv_heads, heads per kv_head, head_dim], a view of `Plan.queries`
    attended: Tensor  # the same for the result


class Plan:
    """The attention calls of one step, the same in every layer. `layer` is any layer: all have one shape."""

    def __init__(self, metadata: AttentionMetadata, query: Tensor, layer: KVLayer, scratch: Scratch) -> None:
        self._metadata, self._model = metadata, _model_of(query, layer)
        self._cache, self._scratch = layer.key_cache, scratch
        lens = metadata.seq_lens_host[metadata.num_prefills :]
        self._rows = sorted((row for row, length in enumerate(lens) if length), key=lens.__getitem__)
        self.order = torch.tensor(self._rows, dtype=torch.int64, device=query.device)  # the shortest sequence first
        self.queries = query.new_empty(len(self._rows), *query.shape[1:])  # [decodes, heads, head_dim], in this order
        self.attended = torch.empty_like(self.queries)
        self.prefills = list(self._prefills())
        self.decodes = list(self._decode_tiles([lens[row] for row in self._rows])) if self._rows else []
        self.is_single = metadata.num_prefills == 0 and len(lens) == len(self.decodes) == 1

    def is_for(self, metadata: AttentionMetadata, query: Tensor, layer: KVLayer) -> bool:
        """Return whether the plan was made for this step and this model."""
        return self._metadata is metadata and self._model == _model_of(query, layer)

    def _prefills(self) -> Iterator[Prefill]:
        metadata, start = self._metadata, 0
        for row in range(metadata.num_prefills):
            num_new, length = metadata.query_lens_host[row], metadata.seq_lens_host[row]
            blocks = metadata.block_tables[row : row + 1, : self._num_blocks(length)]
            mask = None
            if num_new < length or length < FEW_TOKENS:
                mask = self.queries.new_full((num_new, length), -torch.inf).triu_(length - num_new + 1)
            yield Prefill(self._gather(blocks, length), slice(start, start + num_new), mask)
            start += num_new

    def _decode_tiles(self, lens: list[int]) -> Iterator[DecodeTile]:
        """Yield the tiles of all decodes. `lens` and the tiles are in the order of `self.order`."""
        _, block_size, num_kv_heads, head_dim = self._cache.shape
        first = self._metadata.num_prefills
        heads = (-1, num_kv_heads, self.queries.shape[1] // num_kv_heads, head_dim)
        batch: tuple[Tensor, Tensor, Tensor] | None = None
        for rows in _split(lens, TILE_BYTES // (2 * num_kv_heads * head_dim * self.queries.itemsize)):
            longest = lens[rows.stop - 1]
            num_blocks, padding, mask = self._num_blocks(longest), None, None
            if rows.stop - rows.start == 1:
                row = first + self._rows[rows.start]
                block_ids = self._metadata.block_tables[row : row + 1, :num_blocks]
            else:
                batch = batch or self._masked(lens[-1])
                tables, behind, bias = batch
                block_ids = tables[rows, :num_blocks]
                if lens[rows.start] < longest:
                    padding = behind[rows, : num_blocks * block_size].flatten().nonzero().flatten()
                    mask = bias[rows, None, None, :longest]
            if mask is None and longest < FEW_TOKENS:
                mask = self.queries.new_zeros(1, 1, 1, longest)
            gather = self._in_place(block_ids, longest) or self._gather(block_ids, longest, padding)
            yield DecodeTile(gather, mask, self.queries[rows].view(heads), self.attended[rows].view(heads))

    def _masked(self, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors `[decodes, ...]` in the order of `self.order`.

        They are block tables with block 0 after each sequence's end, a mask of the tokens after the end, and the same
        mask as values to add to the scores.
        """
        metadata, cache = self._metadata, self._cache
        block_size, width = cache.shape[1], self._num_blocks(longest)
        tables = metadata.block_tables[metadata.num_prefills :, :width].index_select(0, self.order)
        ends = metadata.seq_lens[metadata.num_prefills :].index_select(0, self.order)
        behind = torch.arange(width * block_size, device=cache.device) >= ends[:, None]  # [decodes, tokens]
        tables.masked_fill_(behind[:, ::block_size], 0)  # block 0 always exists
        return tables, behind, self.queries.new_zeros(behind.shape).masked_fill_(behind, -torch.inf)

    def _in_place(self, block_ids: Tensor, longest: int) -> InPlace | None:
        """Return an `InPlace` if the batch is one short sequence with adjacent blocks in its precision, else None."""
        _, _, num_kv_heads, head_dim = shape = self._cache.shape
        if (
            self._cache.dtype != self.queries.dtype
            or self.attended.shape[0] > 1
            or self._metadata.num_prefills > 0
            or 2 * longest * shape[2:].numel() * self._cache.itemsize > IN_PLACE_BYTES
        ):
            return None
        ids = block_ids[0].tolist()
        if ids != list(range(ids[0], ids[0] + len(ids))):
            return None
        return InPlace((1, num_kv_heads, longest, head_dim), ids[0])

    def _gather(self, block_ids: Tensor, longest: int, padding: Tensor | None = None) -> Gather:
        """Return a `Gather` of `block_ids` `[num_seqs, blocks]`."""
        num_seqs, block_shape = block_ids.shape[0], self._cache.shape[1:]
        scratch = self._scratch.take((2, block_ids.numel(), *block_shape), self.queries)
        views = [kv.view(num_seqs, -1, *block_shape[1:])[:, :longest].transpose(1, 2) for kv in scratch]
        tokens = scratch.view(2, -1, block_shape[1:].numel())
        return Gather(block_ids.flatten(), tuple(scratch), tuple(views), tokens, padding)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.shape[1])


def _split(lens: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Split ascending lengths into tiles of at most `max_tokens`, padding included; a longer sequence is a tile."""
    start, held = 0, 0
    for row, length in enumerate(lens):
        padded = (row + 1 - start) * length
        if row > start and (padded > max_tokens or padded > MAX_PADDING * (held + length)):
            yield slice(start, row)
            start, held = row, 0
        held += length
    yield slice(start, len(lens))


def _model_of(query: Tensor, layer: KVLayer) -> tuple[torch.dtype, torch.Size, torch.Size]:
    return query.dtype, query.shape, layer.key_cache.shape
