"""The KV tensors: their shapes and bytes, and moves of blocks, in their order."""

import pytest
import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage

SPEC = KVCacheSpec(block_size=4, num_layers=3, num_kv_heads=2, head_dim=5, dtype=torch.float32)
CPU = torch.device("cpu")


def storage(num_blocks: int = 6, num_host_blocks: int = 0, **changes: object) -> KVStorage:
    """Nothing but zeros: an engine does not need that, but what a test writes shows then."""
    spec = KVCacheSpec(**{**vars(SPEC), **changes})  # type: ignore[arg-type]
    kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks), device=CPU)
    assert not kv.blocks[:, 0].any(), "padding reads block 0"
    kv.blocks.zero_()
    return kv


def fill(kv: KVStorage) -> None:
    """A value of its own for every number in every block."""
    start = 0
    for index in range(SPEC.num_layers):
        for cache in kv.layer(index)[:2]:
            cache.copy_(torch.arange(start, start + cache.numel()).view_as(cache))
            start += cache.numel()


def blocks(kv: KVStorage) -> list[Tensor]:
    """Each block, K and V of all layers."""
    caches = [cache for index in range(SPEC.num_layers) for cache in kv.layer(index)[:2]]
    return [torch.stack([cache[i] for cache in caches]) for i in range(len(caches[0]))]


def origins(kv: KVStorage, before: list[Tensor]) -> list[int]:
    """For each block, the block of `before` with the same content; -1: none."""
    return [next((i for i, old in enumerate(before) if torch.equal(now, old)), -1) for now in blocks(kv)]


def test_each_layer_has_keys_and_values_in_blocks_with_one_more_for_padding() -> None:
    kv = storage(6)
    for index in range(SPEC.num_layers):
        for cache in kv.layer(index)[:2]:
            assert cache.shape == (7, 4, 2, 5) and cache.dtype == torch.float32 and cache.device == CPU
            assert cache.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_holds_as_many_bytes_as_the_arithmetic_says(dtype: torch.dtype) -> None:
    kv = storage(6, 2, dtype=dtype)
    assert kv.blocks.nbytes == kv.config.num_bytes == 7 * 3 * 2 * 4 * 2 * 5 * dtype.itemsize
    assert kv.host_blocks.nbytes == kv.config.num_host_bytes == 2 * 3 * 2 * 4 * 2 * 5 * dtype.itemsize
    assert storage(6, 0).host_blocks.nbytes == 0


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6]),
        ([(1, 2), (3, 1)], [0, 3, 1, 3, 4, 5, 6]),
        ([(1, 2), (2, 3)], [0, 1, 1, 2, 4, 5, 6]),
        ([(2, 3), (1, 2)], [0, 1, 1, 2, 4, 5, 6]),
        ([(1, 2), (2, 1)], [0, 2, 1, 3, 4, 5, 6]),
        ([(1, 2), (2, 3), (3, 4), (4, 1)], [0, 4, 1, 2, 3, 5, 6]),
    ],
    ids=str,
)
def test_all_sources_are_read_before_any_target_is_written(pairs: list[tuple[int, int]], expected: list[int]) -> None:
    kv = storage()
    fill(kv)
    before = blocks(kv)
    kv.copy_blocks(pairs)
    assert origins(kv, before) == expected


def test_what_is_swapped_out_comes_back_to_other_blocks() -> None:
    kv = storage(6, 3)
    fill(kv)
    before = blocks(kv)
    kv.swap_out([(2, 2), (5, 0)])
    assert origins(kv, before) == [0, 1, 2, 3, 4, 5, 6]
    kv.copy_blocks([(1, 2), (1, 5)])  # they have another owner now
    kv.swap_in([(0, 1), (2, 6)])
    assert origins(kv, before) == [0, 5, 1, 3, 4, 1, 2]
    kv.swap_in([]), kv.swap_out([])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moves_keep_every_bit(dtype: torch.dtype) -> None:
    kv = storage(3, 2, dtype=dtype)
    patterns = torch.arange(-(2**15), 2**15, 97, dtype=torch.int16)[:40].view(4, 2, 5).view(dtype)  # NaN among them
    kv.layer(1).key_cache[1] = patterns
    kv.copy_blocks([(1, 2)])
    kv.swap_out([(2, 1)])
    kv.swap_in([(1, 3)])
    assert torch.equal(kv.layer(1).key_cache[3].view(torch.int16), patterns.view(torch.int16))


# --- memory that is not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [2**45, 2**62, 2**70], ids=lambda n: f"{n:.0e}")
def test_memory_that_the_system_refuses_is_a_configuration_error(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"KV memory of .* blocks takes .* on cpu, which cannot be allocated"):
        storage(num_blocks)
    with pytest.raises(ConfigError, match="on the host, which cannot be allocated"):
        storage(1, num_blocks)
