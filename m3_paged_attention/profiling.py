"""Inputs for the size of the KV memory: the shape of a model's blocks, and a run of the largest step.

Part of the model runner, but a separate file, because both are independent of the format of a batch. New in m3. vLLM:
`profile_run` in `v1/worker/gpu_model_runner.py`; SGLang: `profile_max_num_token`.
"""

import numpy as np
import torch

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder

PROFILED_BLOCK_SIZE = 16


def kv_cache_spec_of(model: Decoder, block_size: int) -> KVCacheSpec:
    """Return the shape of this model's KV blocks."""
    config = model.config
    return KVCacheSpec(
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )


def run_largest_step(model: Decoder, num_tokens: int, *, longest: int, max_num_seqs: int, device: torch.device) -> int:
    """Run the largest step once on dummy tokens: `num_tokens` new tokens, and the logits of a full batch.

    No request has more than `longest` tokens. Returns the bytes of the temporary KV memory of this run.
    """
    spec = kv_cache_spec_of(model, PROFILED_BLOCK_SIZE)
    num_blocks = spec.blocks_for(min(longest, num_tokens))
    kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_blocks), device=device)
    lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
    positions = np.concatenate([np.arange(length) for length in lengths])
    tables = np.tile(np.arange(1, num_blocks + 1, dtype=np.int32), (len(lengths), 1))  # all rows use the same blocks
    metadata = AttentionMetadata.build(lengths, [0] * len(lengths), tables, positions + spec.block_size, device)
    on_device = torch.as_tensor(positions, device=device)
    hidden = model.forward(torch.zeros_like(on_device), on_device, kv, metadata)
    model.compute_logits(hidden[:max_num_seqs])
    return kv.blocks.nbytes
