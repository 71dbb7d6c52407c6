"""A batch on the device: m3's `ModelInput`, and what kind of forward it is.

The last of three forms. `ScheduleBatch` holds requests and lives on; `ModelWorkerBatch` is its plain data for one step;
`ForwardBatch` is the same as tensors. In m3 the runner kept the block tables of all requests and the messages brought
differences. Here it looks them up in `req_to_token`, where the scheduler wrote them: the device still sees tables, and
never learns that pages are shared. SGLang: `model_executor/forward_batch_info.py`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.model_input import ModelInput
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ForwardMode, ModelWorkerBatch


class HoldsTables(Protocol):
    """What `ForwardBatch` must know of a model runner."""

    device: torch.device
    page_size: int
    req_to_token_pool: ReqToTokenPool


@dataclass(frozen=True)
class ForwardBatch(ModelInput):
    """One forward's tensors, all on the model's device. Made anew for every step and never changed."""

    forward_mode: ForwardMode
    batch_size: int

    @classmethod
    def init_new(cls, batch: ModelWorkerBatch, model_runner: HoldsTables) -> "ForwardBatch":
        """Lay out a batch, whose requests with more than one new token come first."""
        device, pool = model_runner.device, model_runner.req_to_token_pool
        if batch.extend_lens is None or batch.prefix_lens is None:
            positions, last = batch.seq_lens - 1, None
            prefix_lens, extend_lens = positions.tolist(), [1] * len(batch.rids)
        else:
            prefix_lens, extend_lens = batch.prefix_lens, batch.extend_lens
            positions, ends = extend_positions(prefix_lens, extend_lens)
            last = torch.as_tensor(ends - 1, device=device)
        tables = pool.page_tables(batch.req_pool_indices, int(batch.seq_lens.max()), model_runner.page_size)
        # What belongs together crosses to the device together: a transfer costs more than its bytes.
        per_token = torch.as_tensor(np.stack([batch.input_ids, positions, batch.out_cache_loc]), device=device)
        return cls(
            input_ids=per_token[0],
            positions=per_token[1],
            attn_metadata=AttentionMetadata.build(extend_lens, prefix_lens, tables, per_token[2], device),
            logits_indices=last,
            forward_mode=batch.forward_mode,
            batch_size=len(batch.rids),
        )


def extend_positions(prefix_lens: list[int], extend_lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The positions of all new tokens, int64 `[total]`, and where each request ends among them, `[batch_size]`.

    Prefixes of 3 and 0 tokens and 2 new ones each: positions 3, 4, 0, 1.
    """
    lens = np.array(extend_lens)
    ends = np.cumsum(lens)
    return np.arange(ends[-1]) + np.repeat(np.array(prefix_lens) - (ends - lens), lens), ends
