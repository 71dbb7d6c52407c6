"""Model input: the new tokens of all requests in a step as one flat row, with their positions and KV slots.

m2 padded its rows to a rectangle, with separate forwards for prefills and decodes. Here there is no padding and one
forward for both: only attention depends on which request a token belongs to, and `AttentionMetadata` stores that. vLLM:
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
    """Input of a forward, on the model's device."""

    input_ids: Tensor  # int64 [total_tokens]
    positions: Tensor  # int64 [total_tokens]
    attn_metadata: AttentionMetadata
    logits_indices: Tensor | None
    """int64 `[num_seqs]`: index of each request's last new token, whose logits are sampled. None: all tokens."""


def make_model_input(
    rows: Sequence[BatchRow], block_tables: np.ndarray, block_size: int, device: torch.device
) -> ModelInput:
    """Build the input of a step from its rows; those with several new tokens come first.

    `block_tables` is int32 `[all requests, max_blocks]`; `row.state.table_row` is the request's row in it.
    """
    starts = [row.start for row in rows]
    query_lens = [row.num_tokens for row in rows]
    longest = max([row.start + row.num_tokens for row in rows])
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    tables = block_tables[[row.state.table_row for row in rows], : (longest - 1) // block_size + 1]
    layout = _decodes_only(len(rows)) if len(token_ids) == len(rows) else _layout(query_lens, device)
    positions = np.array(starts)[layout.owner] + layout.offsets
    slots = tables[layout.owner, positions // block_size] * np.int64(block_size) + positions % block_size
    # One transfer for all three: each transfer to the device has a fixed cost.
    per_token = torch.as_tensor(np.array([token_ids, positions, slots]), device=device)  # int64 [3, total_tokens]
    return ModelInput(
        input_ids=per_token[0],
        positions=per_token[1],
        attn_metadata=AttentionMetadata.build(query_lens, starts, tables, per_token[2], device),
        logits_indices=layout.last,
    )


class TokenLayout(NamedTuple):
    """Layout of the flat row of tokens, which depends only on the number of new tokens of each request."""

    owner: np.ndarray  # [total_tokens]: the row of each token
    offsets: np.ndarray  # [total_tokens]: its index among the new tokens of that row
    last: Tensor | None  # int64 [num_seqs]: index of the last token of each row; None: every row has one token


def _layout(query_lens: Sequence[int], device: torch.device) -> TokenLayout:
    ends = np.cumsum(query_lens)
    owner = np.repeat(np.arange(len(ends)), query_lens)
    offsets = np.arange(len(owner)) - (ends - query_lens)[owner]
    return TokenLayout(owner, offsets, torch.as_tensor(ends - 1, device=device))


@lru_cache
def _decodes_only(num_seqs: int) -> TokenLayout:
    """Return the same for a step of decodes only, cached because most steps are; the arrays are never modified."""
    return TokenLayout(np.arange(num_seqs), np.zeros(num_seqs, dtype=np.int64), None)
