"""Model input: the new tokens of all requests in a step as one flat row, with their positions and KV slots.

m2 padded its rows to a rectangle, with separate forwards for prefills and decodes. Here there is no padding and one
forward for both: only attention depends on which request a token belongs to, and `AttentionMetadata` stores that. vLLM:
`_prepare_inputs` in `v1/worker/gpu_model_runner.py`; SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.input_batch import BatchRow


@dataclass(eq=False)
class ModelInput:
    """Input of a forward. It is built on the host; `to_device` moves all of it to the model's device by one copy."""

    input_ids: Tensor  # int64 [total_tokens]
    positions: Tensor  # int64 [total_tokens]
    attn_metadata: AttentionMetadata
    logits_indices: Tensor | None
    """int64 `[num_seqs]`: index of each request's last new token, whose logits are sampled. None: all tokens."""


def make_model_input(rows: Sequence[BatchRow], block_tables: np.ndarray, block_size: int) -> ModelInput:
    """Build the input of a step from its rows; those with several new tokens come first.

    `block_tables` is int32 `[all requests, max_blocks]`; `row.state.table_row` is the request's row in it.
    """
    starts = [row.start for row in rows]
    query_lens = [row.num_tokens for row in rows]
    longest = max([row.start + row.num_tokens for row in rows])
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    tables = block_tables[[row.state.table_row for row in rows], : (longest - 1) // block_size + 1]
    owner, positions, last = _one_each(len(rows)), np.array(starts), None
    if len(token_ids) > len(rows):
        owner, offsets, last = _layout(query_lens)
        positions = positions[owner] + offsets
    blocks, offsets = np.divmod(positions, block_size)
    slots = tables[owner, blocks] * np.int64(block_size) + offsets
    if last is None:
        metadata = AttentionMetadata.of_decodes(positions + 1, tables, slots)
    else:
        metadata = AttentionMetadata.build(query_lens, starts, tables, slots)
    return ModelInput(
        input_ids=torch.from_numpy(np.array(token_ids)),
        positions=torch.from_numpy(positions),
        attn_metadata=metadata,
        logits_indices=last,
    )


def _layout(query_lens: Sequence[int]) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Return the row of each token, its index among the new tokens of that row, both `[total_tokens]`, and the index
    of the last token of each row, int64 `[num_seqs]`."""
    ends = np.cumsum(query_lens)
    owner = np.repeat(np.arange(len(ends)), query_lens)
    return owner, np.arange(len(owner)) - (ends - query_lens)[owner], torch.from_numpy(ends - 1)


@lru_cache
def _one_each(num_seqs: int) -> np.ndarray:
    """Return the row of each token in a step of decodes only: cached, because most steps are, and never modified."""
    return np.arange(num_seqs)
