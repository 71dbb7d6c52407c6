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
from m3_paged_attention.block_pool import blocks_for
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
    query_lens = [row.num_tokens for row in rows]
    longest = max([row.start + row.num_tokens for row in rows])
    token_ids = [token_id for row in rows for token_id in row.state.token_ids(row.start, row.start + row.num_tokens)]
    tables = block_tables[[row.state.table_row for row in rows], : blocks_for(longest, block_size)]
    places = _decodes_only(len(rows)) if len(token_ids) == len(rows) else _places(query_lens, device)
    positions = np.array(starts)[places.owner] + places.offsets
    slots = tables[places.owner, positions // block_size] * np.int64(block_size) + positions % block_size
    # What belongs together crosses to the device together: a transfer costs more than its bytes.
    per_token = torch.as_tensor(np.array([token_ids, positions, slots]), device=device)  # int64 [3, total_tokens]
    return ModelInput(
        input_ids=per_token[0],
        positions=per_token[1],
        attn_metadata=AttentionMetadata.build(query_lens, starts, tables, per_token[2], device),
        logits_indices=places.last,
    )


class TokenPlaces(NamedTuple):
    """What the numbers of new tokens alone decide."""

    owner: np.ndarray  # [total_tokens]: the row of each token
    offsets: np.ndarray  # [total_tokens]: its place among the new tokens of that row
    last: Tensor | None  # int64 [num_seqs]: the last token of each row; None: every token is that


def _places(query_lens: Sequence[int], device: torch.device) -> TokenPlaces:
    ends = np.cumsum(query_lens)
    owner = np.repeat(np.arange(len(ends)), query_lens)
    offsets = np.arange(len(owner)) - (ends - query_lens)[owner]
    return TokenPlaces(owner, offsets, torch.as_tensor(ends - 1, device=device))


@lru_cache
def _decodes_only(num_seqs: int) -> TokenPlaces:
    """The same for a step of decodes, which is most of them: nobody changes these arrays."""
    return TokenPlaces(np.arange(num_seqs), np.zeros(num_seqs, dtype=np.int64), None)
