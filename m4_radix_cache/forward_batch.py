"""Batch on the device: m3's `ModelInput` with a forward mode.

The last of three forms of a batch. `ScheduleBatch` holds requests and is kept from step to step; `ModelWorkerBatch` is
its plain data for one step; `ForwardBatch` is the same data as tensors. m3's runner kept the block tables of all
requests, and each message changed them. Here the runner reads them from `req_to_token`, where the scheduler wrote
them. Kernels receive block tables as before; shared pages make no difference to them. SGLang:
`model_executor/forward_batch_info.py`.
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
    """Attributes of a model runner that `ForwardBatch` reads."""

    page_size: int
    req_to_token_pool: ReqToTokenPool


@dataclass(eq=False)
class ForwardBatch(ModelInput):
    """Tensors of one forward pass. Built for each step, on the host, moved by `to_device`, and never changed."""

    forward_mode: ForwardMode
    batch_size: int

    @classmethod
    def init_new(cls, batch: ModelWorkerBatch, model_runner: HoldsTables) -> "ForwardBatch":
        """Build the tensors of a batch, in which requests with more than one new token come first."""
        pool, slots = model_runner.req_to_token_pool, batch.out_cache_loc
        tables = pool.page_tables(batch.req_pool_indices, max(batch.seq_lens.tolist()), model_runner.page_size)
        if batch.extend_lens is None or batch.prefix_lens is None:
            positions, last = batch.seq_lens - 1, None
            metadata = AttentionMetadata.of_decodes(batch.seq_lens, tables, slots)
        else:
            positions, ends = extend_positions(batch.prefix_lens, batch.extend_lens)
            last = torch.from_numpy(ends - 1)
            metadata = AttentionMetadata.build(batch.extend_lens, batch.prefix_lens, tables, slots)
        return cls(
            input_ids=torch.from_numpy(batch.input_ids),
            positions=torch.from_numpy(positions),
            attn_metadata=metadata,
            logits_indices=last,
            forward_mode=batch.forward_mode,
            batch_size=len(batch.rids),
        )


def extend_positions(prefix_lens: list[int], extend_lens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all new tokens, int64 `[total_tokens]`, and the end index of each request among them,
    int64 `[batch_size]`.

    With prefixes of 3 and 0 tokens and 2 new tokens each: positions 3, 4, 0, 1 and ends 2, 4.
    """
    lens = np.array(extend_lens)
    ends = np.cumsum(lens)
    return np.arange(ends[-1]) + np.repeat(np.array(prefix_lens) - (ends - lens), lens), ends
