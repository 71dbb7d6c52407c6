"""Attention metadata: the rows, positions and KV slots of the tokens in a flat batch.

m2's batch was a padded rectangle with a mask. Here the tokens of all requests are one flat row of `total_tokens`, and
this object stores where each request begins:

    tokens           | a a a a a | b b | c | d |      two prefills, two decodes
    query_start_loc    0           5     7   8   9
    seq_lens           5           2     31  9        tokens with KV after the step, the new ones included

Rows with several new tokens come first, then rows with exactly one, because attention computes the two kinds
differently. (A row with one token among the first is also correct, only slower.) vLLM: `CommonAttentionMetadata`
(`v1/attention/backends/utils.py`); SGLang has the same numbers in `ForwardBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class AttentionMetadata:
    """Layout of one step's batch: tensors, on the device of its batch (`to_device`), and the lengths on the host.

    Every step makes a new object, which is never modified: a backend may plan once per object and reuse the plan in
    every layer.
    """

    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]
    block_tables: Tensor  # int32 [num_seqs, max_blocks]; unused entries point at block 0
    slot_mapping: Tensor  # int64 [total_tokens]: block id * block_size + offset; padding points into block 0
    num_prefills: int
    """Rows with more than one new token; they come first."""
    num_prefill_tokens: int
    num_decodes: int
    """Rows with exactly one new token."""
    max_query_len: int
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]

    @classmethod
    def of_decodes(
        cls, seq_lens: np.ndarray, block_tables: np.ndarray, slot_mapping: np.ndarray
    ) -> "AttentionMetadata":
        """Build the metadata, as `build` does, of rows with one new token each: most steps have no others.

        `seq_lens`: int64 `[num_seqs]`, tokens with KV after the step.
        """
        num_seqs = len(seq_lens)
        query_lens = (1,) * num_seqs
        return cls(
            query_start_loc=_starts(query_lens),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slot_mapping),
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=num_seqs,
            max_query_len=1,
            query_lens_host=query_lens,
            seq_lens_host=tuple(seq_lens.tolist()),
        )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: np.ndarray,
        slot_mapping: np.ndarray,
    ) -> "AttentionMetadata":
        """Build the metadata, on the host, from each row's number of new tokens and of tokens that already have KV.

        Rows with several new tokens come first. `block_tables` is int32, `slot_mapping` int64; neither is copied.
        """
        query_lens = tuple(query_lens)
        seq_lens = tuple([before + new for before, new in zip(context_lens, query_lens, strict=True)])
        num_decodes = query_lens.count(1)
        num_prefills = len(query_lens) - num_decodes
        return cls(
            query_start_loc=_starts(query_lens),
            seq_lens=torch.from_numpy(np.array(seq_lens, dtype=np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slot_mapping),
            num_prefills=num_prefills,
            num_prefill_tokens=sum(query_lens) - num_decodes,
            num_decodes=num_decodes,
            max_query_len=max(query_lens, default=0),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )


@lru_cache
def _starts(query_lens: tuple[int, ...]) -> Tensor:
    """Return `query_start_loc`, cached because most steps are decodes only; the tensor is never modified."""
    return torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32))
