"""What the kernels should compute, in float64 and without cleverness, and paged memory that punishes a wrong read.

`paged_batch` lays sequences out in pages in random order. All memory that holds no token is NaN, block-table entries
past a sequence's pages are a page that does not exist, and the queries of padding rows are NaN: a kernel that reads
what it should not either gives NaN or crashes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_dtype import dequantize, quantize
from m3_paged_attention.kv_storage import KVLayer, KVStorage

NO_SUCH_PAGE = 10**6


@dataclass(frozen=True)
class PagedBatch:
    """The arguments of `attention`, and what it should return."""

    query: Tensor  # [num_tokens, num_heads, head_dim], a view of fused queries, keys and values
    layer: KVLayer
    metadata: AttentionMetadata
    scale: float
    expected: Tensor  # float64 [num_tokens, num_heads, head_dim]; zeros for padding rows


def paged_batch(
    heads: tuple[int, int, int],
    *,
    prefills: Sequence[tuple[int, int]] = (),
    decodes: Sequence[int] = (),
    dtype: torch.dtype,
    device: torch.device,
    page: int = 16,
    sharpness: float = 1.0,
) -> PagedBatch:
    """A step: `prefills` are (context, new tokens), `decodes` the lengths with the new token, 0 for a padding row.

    `heads` is (query heads, KV heads, head_dim). `sharpness` multiplies the queries, and so the scores.
    """
    num_heads, num_kv_heads, head_dim = heads
    query_lens = [new for _, new in prefills] + [1] * len(decodes)
    seq_lens = [context + new for context, new in prefills] + list(decodes)
    fused = torch.full((sum(query_lens), num_heads + 2 * num_kv_heads, head_dim), torch.nan, dtype=dtype)
    tables, num_pages = _block_tables(seq_lens, page)
    slots = (num_pages, page, num_kv_heads, head_dim)
    layer = KVLayer(torch.full(slots, torch.nan, dtype=dtype), torch.full(slots, torch.nan, dtype=dtype))
    expected = torch.zeros(sum(query_lens), num_heads, head_dim, dtype=torch.float64)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        tokens = slice(start, start + query_len)
        start += query_len
        if not seq_len:
            continue
        generator = torch.Generator().manual_seed(row)  # the rows behind it change nothing of a row
        query, key, value = (
            torch.randn(length, width, head_dim, generator=generator).to(dtype)
            for length, width in ((query_len, num_heads), (seq_len, num_kv_heads), (seq_len, num_kv_heads))
        )
        query *= sharpness
        fused[tokens, :num_heads] = query
        positions = torch.arange(seq_len)
        pages, offsets = tables[row, positions // page].long(), positions % page
        layer.key_cache[pages, offsets], layer.value_cache[pages, offsets] = key, value
        expected[tokens] = causal_attention(query, key, value, head_dim**-0.5)
    return PagedBatch(
        query=fused.to(device)[:, :num_heads],
        layer=KVLayer(*(cache.to(device) for cache in layer[:2])),
        metadata=_metadata(query_lens, seq_lens, len(prefills), tables, device),
        scale=head_dim**-0.5,
        expected=expected,
    )


def _block_tables(seq_lens: Sequence[int], page: int) -> tuple[Tensor, int]:
    """Pages in random order, and how many there are. Page 0 and the last have no owner."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-seq_len // page) for seq_len in seq_lens]
    tables = torch.full((len(seq_lens), max(counts, default=0) + 2), NO_SUCH_PAGE, dtype=torch.int32)
    pages = 1 + torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    for row, owned in enumerate(pages.split(counts)):
        tables[row, : len(owned)] = owned
    return tables, sum(counts) + 2


def _metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_prefills: int, tables: Tensor, device: torch.device
) -> AttentionMetadata:
    queries, lengths = torch.tensor(query_lens, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
    return AttentionMetadata(
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        block_tables=tables.to(device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # attention reads, it does not store
        num_prefills=num_prefills,
        num_prefill_tokens=sum(query_lens[:num_prefills]),
        num_decodes=len(query_lens) - num_prefills,
        max_query_len=max(query_lens, default=0),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
    )


def decode_row(batch: PagedBatch, row: int) -> PagedBatch:
    """Row `row` of a batch of decodes, alone."""
    metadata = batch.metadata
    assert not metadata.num_prefills
    alone = replace(
        metadata,
        query_start_loc=metadata.query_start_loc[:2],
        seq_lens=metadata.seq_lens[row : row + 1],
        block_tables=metadata.block_tables[row : row + 1],
        num_decodes=1,
        query_lens_host=(1,),
        seq_lens_host=metadata.seq_lens_host[row : row + 1],
    )
    return replace(batch, query=batch.query[row : row + 1], metadata=alone, expected=batch.expected[row : row + 1])


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last `len(query)` tokens of a sequence look at all of it up to themselves. Each [length, heads, head_dim]."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    context = len(key) - len(query)
    unseen = torch.ones(len(query), len(key), dtype=torch.bool).triu(context + 1)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x[i], x[i + half]) of every head as a complex number, times exp(i * angle)."""
    low, high = x.double().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


ATTENTION = {torch.float32: 6e-7, torch.float16: 6e-4, torch.bfloat16: 6e-3}
NORM = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
POINTWISE = {torch.float32: 2e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}
EXPERTS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Tolerated error, as a share of the largest expected value. In 16 bits the last rounding decides it; for experts, also
those of what is between their two products, and of the output of each."""
GPU_FLOOR = 2e-6
"""exp2, division and square roots of a GPU may be off by two units in the last place."""


def assert_close(actual: Tensor, expected: Tensor, tolerances: dict[torch.dtype, float]) -> None:
    """The largest error is small against the largest expected value. NaN is never close."""
    tolerance = tolerances[actual.dtype]
    if actual.is_cuda:
        tolerance = max(tolerance, GPU_FLOOR)
    expected = expected.to(actual.device)
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"error {error:.2e}, tolerated {tolerance:.0e}"


TORCH_ATTENTION = {torch.float32: 2e-6}
"""On a CPU, where torch's exp is good to a few units in the last place."""


def attend(backend: Backend, batch: PagedBatch) -> Tensor:
    """The attention of a batch, kept from the next call: `[num_tokens, num_heads, head_dim]`."""
    return backend.attention(batch.query, batch.layer, batch.metadata, batch.scale).clone()


def check_attention(backend: Backend, batch: PagedBatch, tolerances: dict[torch.dtype, float] | None = None) -> Tensor:
    """Compare the attention of a batch with float64, and return it."""
    result = attend(backend, batch)
    own = TORCH_ATTENTION if backend.name == "torch" else {}
    assert_close(result, batch.expected, tolerances or ATTENTION | own)
    return result


def kv_storage(batch: PagedBatch, kv_dtype: torch.dtype) -> KVStorage:
    """Memory of one layer in another format, for the pages of a batch; all of it reads as NaN or as large numbers."""
    num_pages, page, num_kv_heads, head_dim = batch.layer.key_cache.shape
    spec = KVCacheSpec(block_size=page, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=kv_dtype)
    storage = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_pages - 1), device=batch.query.device)
    storage.blocks.view(torch.uint8).fill_(255)
    return storage


def in_kv_dtype(batch: PagedBatch, kv_dtype: torch.dtype) -> PagedBatch:
    """The same batch with its KV in another format, and what attention of the stored numbers should return."""
    layer, metadata = kv_storage(batch, kv_dtype).layer(0), batch.metadata
    expected, page = torch.zeros_like(batch.expected), layer.key_cache.shape[1]
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens_host):
        positions = torch.arange(seq_len, device=batch.query.device)
        where = metadata.block_tables[row, positions // page].long(), positions % page
        read = []
        for cache, to, scales in zip(batch.layer[:2], layer[:2], layer[2:], strict=True):
            if scales is None:
                to[where] = cache[where].to(kv_dtype)
            else:
                to[where], scales[where] = quantize(cache[where], kv_dtype)
            read.append(dequantize(to[where], None if scales is None else scales[where]))
        tokens = slice(starts[row], starts[row + 1])
        if seq_len:
            expected[tokens] = causal_attention(batch.query[tokens], *read, batch.scale).cpu()
    return replace(batch, layer=layer, expected=expected)


def experts(hidden: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, num_experts: int) -> Tensor:
    """The sum of each token's experts, times their weights."""
    gate_ups, downs = (each.double().unflatten(0, (num_experts, -1)) for each in (gate_up, down))
    rows = []
    for x, own, factors in zip(hidden.double(), chosen, weights.double(), strict=True):
        gate, up = (gate_ups[own] @ x).chunk(2, 1)
        outputs = (downs[own] @ (torch.nn.functional.silu(gate) * up)[..., None])[..., 0]
        rows.append(factors @ outputs)
    return torch.stack(rows)
