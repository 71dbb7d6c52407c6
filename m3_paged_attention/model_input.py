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
    query_lens_host = tuple([row.num_tokens for row in rows])
    starts = [row.start for row in rows]
    seq_lens_host = tuple([start + new for start, new in zip(starts, query_lens_host, strict=True)])
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    max_seq_len = max(seq_lens_host)
    tables = block_tables[[row.state.table_row for row in rows], : -(-max_seq_len // block_size)]
    num_tokens = len(token_ids)
    num_prefills = sum([new > 1 for new in query_lens_host])  # they come first
    if num_prefills:
        start_loc = np.cumsum([0, *query_lens_host])
        owner = np.repeat(np.arange(num_seqs), query_lens_host)  # [total_tokens]: the row of each token
        positions = np.arange(num_tokens) - start_loc[owner] + np.array(starts)[owner]
    else:
        start_loc, owner, positions = np.arange(num_seqs + 1), np.arange(num_seqs), np.array(starts)
    slots = tables[owner, positions // block_size] * np.int64(block_size) + positions % block_size
    num_prefill_tokens = int(start_loc[num_prefills])

    def on_device(values: np.ndarray | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        query_start_loc=on_device(start_loc, torch.int32),
        seq_lens=on_device(seq_lens_host, torch.int32),
        context_lens=on_device(starts, torch.int32),
        query_lens=on_device(query_lens_host, torch.int32),
        block_tables=on_device(tables, torch.int32),
        slot_mapping=on_device(slots, torch.int64),
        num_prefills=num_prefills,
        num_prefill_tokens=num_prefill_tokens,
        num_decodes=num_seqs - num_prefills,
        num_decode_tokens=num_tokens - num_prefill_tokens,
        max_query_len=max(query_lens_host),
        max_seq_len=max_seq_len,
        query_lens_host=query_lens_host,
        seq_lens_host=seq_lens_host,
    )
    return ModelInput(
        input_ids=on_device(token_ids, torch.int64),
        positions=on_device(positions, torch.int64),
        attn_metadata=metadata,
        logits_indices=on_device(start_loc[1:] - 1, torch.int64),
    )
