"""How the torch backend goes through a batch: which sequences are attended to in one call.

A call per sequence is too many calls when sequences are short. One call for all of them needs a rectangle as wide as
the longest, and a copy of all their KV, too large for any cache. In between are tiles: sequences of similar length side
by side, as many as `TILE_BYTES` hold.

    lengths 30 35 38 | 210 240 | 900          three tiles

Behind the end of a shorter sequence lies what belongs to another or to nobody. There the scratch is zeroed and the
scores are masked, so that nothing of it is seen, not even a NaN.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVLayer

TILE_BYTES = 2 * 2**20  # keys and values of a tile, padding included
MAX_PADDING = 1.25  # a tile is at most so many times as large as what its sequences hold
FEW_TOKENS = 16  # without a mask, torch's attention makes zeros of NaN for sequences shorter than its vectors
IN_PLACE_BYTES = 2**19  # keys and values of a sequence that stay in the cache from one step to the next by themselves


class Scratch:
    """Memory that is written anew for every tile and grows to the largest."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape. The next call may return the same memory."""
        size = torch.Size(shape).numel()
        if self._buffer is None or self._buffer.numel() < size or not _alike(self._buffer, like):
            self._buffer = like.new_empty(size)
        return self._buffer[:size].view(shape)


class Gather(NamedTuple):
    """Copies the blocks of a few sequences side by side."""

    block_ids: Tensor  # [num_seqs * blocks per sequence]
    scratch: tuple[Tensor, ...]  # for keys and values, each [num_seqs * blocks, block_size, kv_heads, head_dim]
    views: tuple[Tensor, ...]  # of the same memory, each [num_seqs, kv_heads, longest sequence, head_dim]
    tokens: Tensor  # of the same memory, [2, tokens, kv_heads * head_dim]
    padding: Tensor | None  # those of the tokens that belong to no sequence

    def __call__(self, layer: KVLayer) -> tuple[Tensor, ...]:
        """Keys and values `[num_seqs, kv_heads, longest sequence, head_dim]`, good until the next gather."""
        torch.index_select(layer.key_cache, 0, self.block_ids, out=self.scratch[0])
        torch.index_select(layer.value_cache, 0, self.block_ids, out=self.scratch[1])
        if self.padding is not None:
            self.tokens.index_fill_(1, self.padding, 0)
        return self.views


class InPlace(NamedTuple):
    """Reads a sequence whose blocks happen to lie one after another, as those of a request that runs alone do."""

    shape: tuple[int, int, int, int]  # [1, kv_heads, sequence, head_dim]
    first_block: int

    def __call__(self, layer: KVLayer) -> tuple[Tensor, ...]:
        """Keys and values of that shape."""
        _, num_kv_heads, _, head_dim = self.shape
        strides = (0, head_dim, num_kv_heads * head_dim, 1)
        return tuple(  # one call instead of the four that cut, join and turn dimensions
            cache.as_strided(self.shape, strides, cache.storage_offset() + self.first_block * cache.stride(0))
            for cache in layer
        )


class Prefill(NamedTuple):
    """The new tokens of one sequence."""

    gather: Gather
    tokens: slice
    mask: Tensor | None  # [new tokens, sequence], added to the scores; None: all of the sequence is new, and long


class DecodeTile(NamedTuple):
    """The last tokens of a few sequences of similar length."""

    gather: Gather | InPlace
    mask: Tensor | None  # [num_seqs, 1, 1, longest sequence], added to the scores; None: equally long, and not short
    queries: Tensor  # [num_seqs, kv_heads, heads per kv_head, head_dim], a view of the plan's
    attended: Tensor  # the same for the result


class Plan:
    """What attention does in every layer of one step. `layer` is any of them: they are all of one shape."""

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
        """Whether this is still the step, and the model, that the plan was made for."""
        return self._metadata is metadata and self._model == _model_of(query, layer)

    def _prefills(self) -> Iterator[Prefill]:
        metadata, start = self._metadata, 0
        for row in range(metadata.num_prefills):
            num_new, length = metadata.query_lens_host[row], metadata.seq_lens_host[row]
            blocks = metadata.block_tables[row : row + 1, : self._num_blocks(length)]
            mask = None
            if num_new < length or length < FEW_TOKENS:
                mask = self._cache.new_full((num_new, length), -torch.inf).triu_(length - num_new + 1)
            yield Prefill(self._gather(blocks, length), slice(start, start + num_new), mask)
            start += num_new

    def _decode_tiles(self, lens: list[int]) -> Iterator[DecodeTile]:
        """`lens` and everything here is in the plan's order."""
        _, block_size, num_kv_heads, head_dim = self._cache.shape
        first = self._metadata.num_prefills
        heads = (-1, num_kv_heads, self.queries.shape[1] // num_kv_heads, head_dim)
        batch: tuple[Tensor, Tensor, Tensor] | None = None
        for rows in _split(lens, TILE_BYTES // (2 * num_kv_heads * head_dim * self._cache.itemsize)):
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
                mask = self._cache.new_zeros(1, 1, 1, longest)
            gather = self._in_place(block_ids, longest) or self._gather(block_ids, longest, padding)
            yield DecodeTile(gather, mask, self.queries[rows].view(heads), self.attended[rows].view(heads))

    def _masked(self, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """For all decodes at once, in the plan's order: block tables with nothing but 0 behind the end, which tokens
        are behind it (both `[decodes, ...]`), and the same as something to add to scores."""
        metadata, cache = self._metadata, self._cache
        block_size, width = cache.shape[1], self._num_blocks(longest)
        tables = metadata.block_tables[metadata.num_prefills :, :width].index_select(0, self.order)
        ends = metadata.seq_lens[metadata.num_prefills :].index_select(0, self.order)
        behind = torch.arange(width * block_size, device=cache.device) >= ends[:, None]  # [decodes, tokens]
        tables.masked_fill_(behind[:, ::block_size], 0)  # block 0 is always there
        return tables, behind, cache.new_zeros(behind.shape).masked_fill_(behind, -torch.inf)

    def _in_place(self, block_ids: Tensor, longest: int) -> InPlace | None:
        """If one sequence, and a short one, is the whole batch and lies in one piece."""
        _, _, num_kv_heads, head_dim = shape = self._cache.shape
        if (
            self.attended.shape[0] > 1
            or self._metadata.num_prefills > 0
            or 2 * longest * shape[2:].numel() * self._cache.itemsize > IN_PLACE_BYTES
        ):
            return None
        ids = block_ids[0].tolist()
        if ids != list(range(ids[0], ids[0] + len(ids))):
            return None
        return InPlace((1, num_kv_heads, longest, head_dim), ids[0])

    def _gather(self, block_ids: Tensor, longest: int, padding: Tensor | None = None) -> Gather:
        """`block_ids` is `[num_seqs, blocks]`."""
        num_seqs, block_shape = block_ids.shape[0], self._cache.shape[1:]
        scratch = self._scratch.take((2, block_ids.numel(), *block_shape), self._cache)
        views = [kv.view(num_seqs, -1, *block_shape[1:])[:, :longest].transpose(1, 2) for kv in scratch]
        tokens = scratch.view(2, -1, block_shape[1:].numel())
        return Gather(block_ids.flatten(), tuple(scratch), tuple(views), tokens, padding)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.shape[1])


def _split(lens: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Cut rising lengths into tiles of at most `max_tokens`, padding included; a sequence longer than that is alone."""
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


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device
