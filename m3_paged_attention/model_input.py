"""One step as tensors: the new tokens of all requests in a single row, and where they belong.

m2 padded its rows to a rectangle, prefills and decodes apart. Here nothing is padded and one forward serves both, for a
token does not care whose neighbour it is: only attention does, and it is told by `AttentionMetadata`. vLLM:
`_prepare_inputs` in `v1/worker/gpu_model_runner.py`; SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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
    logits_indices: Tensor | None
    """int64 `[num_seqs]`: the last new token of each request, which gives its next one. None: there is no other."""


def make_model_input(
    rows: Sequence[BatchRow], block_tables: np.ndarray, block_size: int, device: torch.device
) -> ModelInput:
    """Lay out the rows of a step, which come with the longer ones first.

    `block_tables` is int32 `[all requests, max_blocks]`; each row's state says which of its rows is its own.
    """
    starts = [row.start for row in rows]
    query_lens = tuple([row.num_tokens for row in rows])
    seq_lens = tuple([start + new for start, new in zip(starts, query_lens, strict=True)])
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    tables = block_tables[[row.state.table_row for row in rows], : -(-max(seq_lens) // block_size)]
    shape = _decodes_only(len(rows), device) if len(token_ids) == len(rows) else _shape(query_lens, device)
    owner = shape.owner
    positions = np.array(starts)[owner] + shape.offsets
    slots = tables[owner, positions // block_size] * np.int64(block_size) + positions % block_size
    # What belongs together crosses to the device together: a transfer costs more than its bytes.
    per_token = torch.as_tensor(np.array([token_ids, positions, slots]), device=device)  # int64 [3, total_tokens]
    per_row = torch.as_tensor(np.array([seq_lens, starts], dtype=np.int32), device=device)  # [2, num_seqs]
    metadata = AttentionMetadata(
        query_start_loc=shape.query_start_loc,
        seq_lens=per_row[0],
        context_lens=per_row[1],
        query_lens=shape.query_lens,
        block_tables=torch.as_tensor(tables, device=device),
        slot_mapping=per_token[2],
        num_prefills=shape.num_prefills,
        num_prefill_tokens=shape.num_prefill_tokens,
        num_decodes=len(rows) - shape.num_prefills,
        num_decode_tokens=len(token_ids) - shape.num_prefill_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return ModelInput(
        input_ids=per_token[0],
        positions=per_token[1],
        attn_metadata=metadata,
        logits_indices=shape.logits_indices,
    )


class StepShape(NamedTuple):
    """What the numbers of new tokens alone decide."""

    owner: np.ndarray  # [total_tokens]: the row of each token
    offsets: np.ndarray  # [total_tokens]: its place among the new tokens of that row
    num_prefills: int
    num_prefill_tokens: int
    query_start_loc: Tensor  # int32 [num_seqs + 1]
    query_lens: Tensor  # int32 [num_seqs]
    logits_indices: Tensor | None  # int64 [num_seqs]; None: every token is the last of its row


def _shape(query_lens: Sequence[int], device: torch.device) -> StepShape:
    lens = np.array(query_lens)
    start_loc = np.cumsum([0, *query_lens])
    owner = np.repeat(np.arange(len(lens)), lens)
    num_prefills = int((lens > 1).sum())  # they come first
    return StepShape(
        owner=owner,
        offsets=np.arange(len(owner)) - start_loc[owner],
        num_prefills=num_prefills,
        num_prefill_tokens=int(start_loc[num_prefills]),
        query_start_loc=torch.as_tensor(start_loc, dtype=torch.int32, device=device),
        query_lens=torch.as_tensor(lens, dtype=torch.int32, device=device),
        logits_indices=torch.as_tensor(start_loc[1:] - 1, device=device) if num_prefills else None,
    )


@lru_cache
def _decodes_only(num_seqs: int, device: torch.device) -> StepShape:
    """The same for a step of decodes, which is most of them: nobody changes these arrays."""
    return _shape((1,) * num_seqs, device)
