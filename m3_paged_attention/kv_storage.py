"""The KV tensors: K and V of all blocks per layer, and copies of whole blocks.

m2's tensors had one row of `max_model_len` tokens per request. Here a row is a block of a few tokens. The storage
has no owners of blocks: they are in the block tables (`kv_cache_manager.py`). Slot of a token = block id *
block_size + offset. Block 0 has no owner; padding is written there. A backend's `store_kv` writes the new tokens. vLLM:
`v1/worker/gpu_model_runner.py` and `csrc/cache_kernels.cu`; SGLang: `mem_cache/memory_pool.py`.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.trace_event import size
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.block_pool import Pairs
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_dtype import LARGEST, SCALE_BYTES


class KVLayer(NamedTuple):
    """One layer's keys and values. Scales are None in a format without."""

    key_cache: Tensor  # [num_blocks_total, block_size, num_kv_heads, head_dim]; each block is contiguous
    value_cache: Tensor  # the same shape
    key_scales: Tensor | None = None  # float32 [num_blocks_total, block_size, num_kv_heads]
    value_scales: Tensor | None = None


class Step(Protocol):
    """All layers of a model over one KV memory, as one call."""

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Return whether this call computes a step of this layout; if not, its layers run one by one."""

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return what `Decoder.forward` returns for the same arguments."""


class KVStorage:
    """All KV memory of a model on one device, and the host memory for swapping."""

    step: Step | None = None
    """All layers of the model in one call over this memory, if its backend has one (`Decoder.use_kv`)."""

    def __init__(self, config: KVCacheConfig, *, device: torch.device) -> None:
        """Allocate all blocks. Raises `ConfigError` if the machine has less memory.

        Only block 0, which padding reads, is written. On a CPU another block takes memory only when it is written.
        """
        spec = config.spec
        self.config = config
        block: tuple[int, ...] = (spec.block_size, spec.num_kv_heads, spec.head_dim)
        dtype = spec.dtype
        if dtype in LARGEST:  # raw bytes: the numbers of the block, then its scales, so that no copy loses them
            block, dtype = (spec.page_size_bytes // 2,), torch.uint8
        try:
            self.blocks = torch.empty(
                (spec.num_layers * 2, config.num_blocks_total, *block), dtype=dtype, device=device
            )
            """All blocks: `blocks[:, i]` is block i, with the keys of layer 0, its values, the keys of layer 1, and so
            on. `layer` returns views of it."""
            self.host_blocks = torch.empty(  # a block of all layers is contiguous, so it is one copy
                (config.num_host_blocks, spec.num_layers * 2, *block),
                dtype=dtype,
                pin_memory=device.type == "cuda" and config.num_host_blocks > 0,
            )
        except (RuntimeError, TypeError) as error:  # out of memory, or a number too large for C
            raise ConfigError(
                f"KV memory of {config.num_blocks_total:,} blocks takes {size(config.num_bytes)} on {device}"
                f"{f' and {size(config.num_host_bytes)} on the host' if config.num_host_blocks else ''}, which cannot "
                f"be allocated: {error}"
            ) from error
        self.blocks[:, 0] = 0
        pairs = self.blocks.view(spec.num_layers, 2, *self.blocks.shape[1:])
        self._layers = [_scaled_layer(pair, spec) if spec.dtype in LARGEST else KVLayer(*pair) for pair in pairs]

    def layer(self, index: int) -> KVLayer:
        """Return the KV tensors of one layer, to read and write in place."""
        return self._layers[index]

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy blocks `(source, target)`. All sources are read before any target is written."""
        targets = {target for _, target in pairs}
        saved = {source: self.blocks[:, source].clone() for source, _ in pairs if source in targets}
        for source, target in pairs:
            self.blocks[:, target].copy_(saved[source] if source in saved else self.blocks[:, source])

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks `(device block, host block)` to the host."""
        for block_id, host_id in pairs:
            self.host_blocks[host_id].copy_(self.blocks[:, block_id], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy blocks `(host block, device block)` to the device."""
        for host_id, block_id in pairs:
            self.blocks[:, block_id].copy_(self.host_blocks[host_id], non_blocking=True)


def _scaled_layer(pair: Tensor, spec: KVCacheSpec) -> KVLayer:
    """Return the views of one layer's bytes `[2, num_blocks_total, bytes]`: numbers, and the scales behind them."""
    num_scales = spec.block_size * spec.num_kv_heads
    numbers, scales = pair.split_with_sizes([num_scales * spec.head_dim, num_scales * SCALE_BYTES], -1)
    caches = numbers.view(spec.dtype).view(2, -1, spec.block_size, spec.num_kv_heads, spec.head_dim)
    # head by head, so that a kernel reads the scales of adjacent tokens at once
    by_head = scales.view(torch.float32).view(2, -1, spec.num_kv_heads, spec.block_size)
    return KVLayer(*caches, *by_head.transpose(-1, -2))
