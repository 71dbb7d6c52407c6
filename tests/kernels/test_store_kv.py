"""New keys and values go to their slots, and nowhere else."""

from dataclasses import replace

import pytest
import torch

from m3_paged_attention.kv_storage import KVLayer
from tests.kernels.references import paged_batch

SLOTS = [17, 16, 3, 63, 40, 41, 4]


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (1, 128), (3, 80)])
def test_writes_the_slots_of_the_mapping(backend, device, dtype, page, num_kv_heads, head_dim) -> None:
    fused = torch.randn(len(SLOTS), 4 * num_kv_heads, head_dim, dtype=dtype, device=device)
    key, value = fused[:, 2 * num_kv_heads :].split(num_kv_heads, dim=1)
    shape = (64 // page, page, num_kv_heads, head_dim)
    layer = KVLayer(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"))
    expected = KVLayer(*(cache.clone() for cache in layer[:2]))
    slots = torch.tensor(SLOTS, device=device)
    expected.key_cache.view(64, num_kv_heads, head_dim)[slots] = key
    expected.value_cache.view(64, num_kv_heads, head_dim)[slots] = value
    backend.store_kv(key, value, layer, slots)
    for actual, wanted in zip(layer[:2], expected[:2], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def test_padding_goes_to_block_0(backend, device) -> None:
    key = torch.randn(4, 2, 64, device=device)
    layer = KVLayer(torch.zeros(3, 4, 2, 64, device=device), torch.zeros(3, 4, 2, 64, device=device))
    backend.store_kv(key, key, layer, torch.tensor([6, 0, 0, 0], device=device))
    assert torch.equal(layer.key_cache.view(12, 2, 64)[6], key[0])
    assert layer.key_cache[1:].count_nonzero() == layer.value_cache[1:].count_nonzero() == key[0].numel()


def test_a_slot_may_lie_beyond_two_billion_elements(backend, device, monkeypatch) -> None:
    """Slot times stride is a 64-bit product, where a token is stored and where it is read.

    4 GiB are reserved for it; on a CPU nearly none of them is touched.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    last_block = 2**21
    cache = torch.empty(last_block + 1, 16, 1, 64, dtype=torch.bfloat16, device=device)
    layer = KVLayer(cache, cache)
    key = torch.randn(1, 1, 64, dtype=cache.dtype, device=device)
    backend.store_kv(key, key, layer, torch.tensor([last_block * 16], device=device))
    assert torch.equal(cache[-1, 0], key[0])
    batch = paged_batch((1, 1, 64), decodes=[1], dtype=cache.dtype, device=device)
    tables = torch.full_like(batch.metadata.block_tables, last_block)
    metadata = replace(batch.metadata, block_tables=tables)
    assert torch.equal(backend.attention(batch.query, layer, metadata, 0.125), key)
