"""A batch on the device, in which requests may have any number of new tokens, in any order.

m4 laid out prompts or decodes, sorted already. Here a decode with guesses has several tokens today and one tomorrow, so
the rows of a batch stand in the order in which they live, and only the layout on the device puts those with more than
one new token first. Which logits belong to whom is told in the batch's own order. SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.model_input import ModelInput
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool


class HoldsTables(Protocol):
    """What `ForwardBatch` must know of a model runner."""

    device: torch.device
    page_size: int
    req_to_token_pool: ReqToTokenPool


class NewTokens(Protocol):
    """What a forward computes: the new tokens of some requests, one request after the other."""

    @property
    def input_ids(self) -> np.ndarray:
        """int64 `[total_tokens]`."""
        ...

    @property
    def req_pool_indices(self) -> np.ndarray:
        """int64 `[batch_size]`."""
        ...

    @property
    def seq_lens(self) -> np.ndarray:
        """int64 `[batch_size]`: tokens with KV after this forward."""
        ...

    @property
    def new_lens(self) -> np.ndarray:
        """int64 `[batch_size]`, at least 1."""
        ...

    @property
    def out_cache_loc(self) -> np.ndarray:
        """int64 `[total_tokens]`."""
        ...

    @property
    def sample_lens(self) -> Sequence[int]:
        """How many of each request's last new tokens have their logits looked at."""
        ...


@dataclass(frozen=True)
class SomeTokens:
    """New tokens that are no step of the engine's: those of a draft model."""

    input_ids: np.ndarray
    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    new_lens: np.ndarray
    out_cache_loc: np.ndarray
    sample_lens: Sequence[int]


def nothing_in_page_0(num_rows: int, num_tokens: int, context: int, page_size: int) -> SomeTokens:
    """`num_rows` times `num_tokens` new tokens behind `context` others, to see what they cost. They lie in page 0, and
    nobody reads them."""
    total = num_rows * num_tokens
    return SomeTokens(
        input_ids=np.zeros(total, dtype=np.int64),
        req_pool_indices=np.full(num_rows, NO_ROW),
        seq_lens=np.full(num_rows, context + num_tokens),
        new_lens=np.full(num_rows, num_tokens),
        out_cache_loc=np.arange(total) % page_size,
        sample_lens=[num_tokens] * num_rows,
    )


NO_ROW = -1
"""In the place of a row of slots: all its tokens lie in page 0."""


@dataclass(frozen=True)
class ForwardBatch(ModelInput):
    """One forward's tensors, all on the model's device. Made anew for every step and never changed."""

    starts: np.ndarray
    """int64 `[batch_size]`: where the tokens of each request begin in this layout."""

    @classmethod
    def init_new(cls, batch: NewTokens, model_runner: HoldsTables) -> "ForwardBatch":
        """Lay out a batch."""
        lens, device = batch.new_lens, model_runner.device
        order = np.argsort(lens == 1, kind="stable")  # of the rows on the device
        begins = np.cumsum(lens) - lens  # of each request's tokens, in the batch
        starts = np.empty_like(lens)
        starts[order] = np.cumsum(lens[order]) - lens[order]  # and in the layout
        places = ranges(begins[order], lens[order])  # where each token of the layout stands in the batch
        prefix_lens = batch.seq_lens - lens
        positions = ranges(prefix_lens[order], lens[order])
        # What belongs together crosses to the device together: a transfer costs more than its bytes.
        columns = [batch.input_ids[places], positions, batch.out_cache_loc[places]]
        per_token = torch.as_tensor(np.stack(columns), device=device)
        longest, page_size = int(batch.seq_lens.max()), model_runner.page_size
        rows = batch.req_pool_indices[order]
        if rows[0] == NO_ROW:
            tables = np.zeros((len(rows), -(-longest // page_size)), dtype=np.int32)
        else:
            tables = model_runner.req_to_token_pool.page_tables(rows, longest, page_size)
        query_lens, context_lens = lens[order].tolist(), prefix_lens[order].tolist()
        looked_at = np.array(batch.sample_lens)
        logits = ranges(starts + lens - looked_at, looked_at)
        is_all = len(logits) == len(places) and bool((logits == np.arange(len(places))).all())
        return cls(
            input_ids=per_token[0],
            positions=per_token[1],
            attn_metadata=AttentionMetadata.build(query_lens, context_lens, tables, per_token[2], device),
            logits_indices=None if is_all else torch.as_tensor(logits, device=device),
            starts=starts,
        )


def ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """`starts[0], starts[0] + 1, ...` `lens[0]` times, then those of the next one. Starts 3 and 0, lengths 2 and 2: 3,
    4, 0, 1."""
    ends = np.cumsum(lens)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lens), lens)
