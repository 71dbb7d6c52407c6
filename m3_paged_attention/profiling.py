"""Run of the largest step, which measures the memory that is needed beside the KV memory.

Part of the model runner, but a separate file, because it is independent of the format of a batch. New in m3. vLLM:
`profile_run` and `_dummy_sampler_run` in `v1/worker/gpu_model_runner.py`; SGLang: `profile_max_num_token`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.row_sampler import without_broken_rows

PROFILED_BLOCK_SIZE = 16
EVERY_SETTING = SamplingParams(
    temperature=1.0,
    top_k=1,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=20,
)
"""Settings that each take memory in sampling. Their values do not change how much, except the number of `logprobs`:
20 is the most that vLLM accepts by default."""


def run_largest_step(
    model: Decoder, num_tokens: int, *, longest: int, num_rows: int, sampler: Sampler, device: torch.device
) -> int:
    """Run the largest step once on dummy tokens: `num_tokens` new tokens, and a sampled token for `num_rows` of them.

    No request has more than `longest` tokens. Returns the bytes of the temporary KV memory of this run.
    """
    spec = model.kv_cache_spec(PROFILED_BLOCK_SIZE)
    num_blocks = spec.blocks_for(min(longest, num_tokens))
    kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=num_blocks), device=device)
    lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
    positions = np.concatenate([np.arange(length) for length in lengths])
    tables = np.tile(np.arange(1, num_blocks + 1, dtype=np.int32), (len(lengths), 1))  # all rows use the same blocks
    metadata = AttentionMetadata.build(lengths, [0] * len(lengths), tables, positions + spec.block_size)
    metadata = to_device(metadata, device)
    on_device = torch.as_tensor(positions, device=device)
    hidden = model.forward(torch.zeros_like(on_device), on_device, kv, metadata)
    sample_every_setting(sampler, model.compute_logits(hidden[:num_rows]))
    return kv.blocks.nbytes


def sample_every_setting(sampler: Sampler, logits: Tensor) -> None:
    """Sample a token from each row of `logits` `[rows, vocab]`, with all settings that take memory."""
    row = SamplingRow(EVERY_SETTING, seed=0, prompt_token_ids=(0,), output_token_ids=(0,))
    one = SamplingMetadata.from_rows([row], vocab_size=logits.shape[-1], device=logits.device)
    many = {name: repeated(value, len(logits)) for name, value in vars(one).items()}
    sampler(without_broken_rows(logits)[0], SamplingMetadata(**many))


def repeated(value: Any, num_rows: int) -> Any:
    """Return a value of `SamplingMetadata` for one row as that for `num_rows` equal rows."""
    if isinstance(value, Tensor):
        return value.repeat_interleave(num_rows, dim=0)
    if isinstance(value, tuple):
        return tuple(repeated(v, num_rows) for v in value) if isinstance(value[0], Tensor) else value * num_rows
    return value
