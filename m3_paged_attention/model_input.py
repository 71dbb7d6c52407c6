"""One step as tensors: the new tokens of all requests in a single row, and where they belong.

m2 padded its rows to a rectangle, prefills and decodes apart. Here nothing is padded and one forward serves both, for a
token does not care whose neighbour it is: only attention does, and it is told by `AttentionMetadata`. vLLM:
`_prepare_inputs` in `v1/worker/gpu_model_runner.py`; SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.input_batch import BatchRow


@dataclass(frozen=True)
class ModelInput:
    """What a forward needs, on the model's device."""

    input_ids: Tensor  # int64 [total_tokens]
    positions: Tensor  # int64 [total_tokens]
    attn_metadata: AttentionMetadata
    logits_indices: Tensor  # int64 [num_seqs]: the last new token of each request, from which its next one comes


def make_model_input(
    rows: Sequence[BatchRow], block_tables: np.ndarray, block_size: int, device: torch.device
) -> ModelInput:
    """Lay out the rows of a step, which come with the longer ones first.

    `block_tables` is int32 `[all requests, max_blocks]`; each row's state says which of its rows is its own.
    """
    num_seqs = len(rows)
    query_lens = np.array([row.num_tokens for row in rows], dtype=np.int32)
    context_lens = np.array([row.start for row in rows], dtype=np.int32)
    seq_lens = context_lens + query_lens
    query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    max_seq_len, max_query_len = int(seq_lens.max()), int(query_lens.max())
    width = -(-max_seq_len // block_size)
    tables = block_tables[[row.state.table_row for row in rows], :width]  # [num_seqs, width]
    num_prefills = int((query_lens > 1).sum())
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    if num_prefills:
        owner = np.repeat(np.arange(num_seqs), query_lens)  # [total_tokens]: the row of each token
        positions = np.arange(len(token_ids)) - query_start_loc[owner] + context_lens[owner]
    else:
        owner, positions = np.arange(num_seqs), context_lens.astype(np.int64)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def on_device(values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

    num_prefill_tokens = int(query_start_loc[num_prefills])
    metadata = AttentionMetadata(
        query_start_loc=on_device(query_start_loc),
        seq_lens=on_device(seq_lens),
        context_lens=on_device(context_lens),
        query_lens=on_device(query_lens),
        block_tables=on_device(tables),
        slot_mapping=on_device(slots),
        num_prefills=num_prefills,
        num_prefill_tokens=num_prefill_tokens,
        num_decodes=num_seqs - num_prefills,
        num_decode_tokens=len(token_ids) - num_prefill_tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        query_lens_host=tuple(query_lens.tolist()),
        seq_lens_host=tuple(seq_lens.tolist()),
    )
    return ModelInput(
        input_ids=on_device(np.array(token_ids, dtype=np.int64)),
        positions=on_device(positions, torch.int64),
        attn_metadata=metadata,
        logits_indices=on_device(query_start_loc[1:] - 1, torch.int64),
    )
