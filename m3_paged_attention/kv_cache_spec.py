"""Shape and size of the KV memory, and the memory of a device that was measured for it, as plain records.

`kv_cache_config.py` computes them. m2's KV memory has one row of `max_model_len` tokens per request; this one has
blocks. vLLM: `v1/kv_cache_interface.py`.
"""

from dataclasses import dataclass

import torch

from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.kv_dtype import vector_bytes


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The shape of one block."""

    block_size: int
    """Tokens per block."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Format of the numbers, one of `kv_dtype.py` or the model's."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of K and V of a block in one layer, with their scales."""
        return 2 * self.block_size * self.num_kv_heads * vector_bytes(self.head_dim, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of a block in all layers."""
        return self.num_layers * self.page_size_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, rounded up."""
        return blocks_for(num_tokens, self.block_size)


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The shape and the number of blocks."""

    spec: KVCacheSpec
    num_blocks: int
    """Blocks that can be allocated; block 0 is additional."""
    num_host_blocks: int = 0
    """Blocks in host memory."""

    @property
    def num_blocks_total(self) -> int:
        return self.num_blocks + 1

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, including block 0."""
        return self.num_blocks_total * self.spec.block_bytes

    @property
    def num_host_bytes(self) -> int:
        return self.num_host_blocks * self.spec.block_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Result of a profiling run on a CUDA device."""

    total_bytes: int
    """The device's memory, or the part of it that is this engine's."""
    peak_bytes: int
    """Peak memory of this engine without KV: weights, activations of the largest step."""
    other_bytes: int = 0
    """Memory that other processes use."""

    def part(self, num_shares: int) -> "MemoryProfile":
        """Return the profile of one of `num_shares` engines that divide the device: itself for 1.

        Each of them has an equal part of the memory, and counts its own peak only. What the others use is in their
        parts, whichever of them starts first, so an engine that starts again gets the same size. The CUDA contexts of
        all processes must fit into the memory that `gpu_memory_utilization` leaves, a tenth of the device by default.
        """
        if num_shares == 1:
            return self
        return MemoryProfile(total_bytes=self.total_bytes // num_shares, peak_bytes=self.peak_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that cannot be KV memory."""
        return self.peak_bytes + self.other_bytes
