"""A batch on the device, in which requests may have any number of new tokens, in any order.

m4 laid out prompts or decodes, sorted already. Here a decode with guesses has several tokens today and one tomorrow, so
the rows of a batch stand in the order in which they live, and only the layout on the device puts those with more than
one new token first. Which logits belong to whom is told in the batch's own order. SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.model_input import ModelInput
from m4_radix_cache.forward_batch import HoldsTables


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
        lens, device, rows = batch.new_lens, model_runner.device, batch.req_pool_indices
        prefix_lens = batch.seq_lens - lens
        is_alone = lens == 1
        if is_alone.all():  # as in most steps: every order is right
            starts, positions = _numbers(len(lens)), prefix_lens
            columns = [batch.input_ids, positions, batch.out_cache_loc]
        elif (is_alone[:-1] <= is_alone[1:]).all():  # prompts before decodes: they lie as they should
            starts = np.cumsum(lens) - lens
            columns = [batch.input_ids, ranges(prefix_lens, lens), batch.out_cache_loc]
        else:
            order = np.argsort(is_alone, kind="stable")  # of the rows on the device
            rows, own_lens = rows[order], lens[order]
            begins = np.cumsum(lens) - lens  # of each request's tokens, in the batch
            starts = np.empty_like(lens)
            starts[order] = np.cumsum(own_lens) - own_lens  # and in the layout
            places = ranges(begins[order], own_lens)  # where each token of the layout stands in the batch
            prefix_lens = prefix_lens[order]
            columns = [batch.input_ids[places], ranges(prefix_lens, own_lens), batch.out_cache_loc[places]]
            lens = own_lens
        # What belongs together crosses to the device together: a transfer costs more than its bytes.
        per_token = torch.as_tensor(np.stack(columns), device=device)
        longest, page_size = int(batch.seq_lens.max()), model_runner.page_size
        if rows[0] == NO_ROW:
            tables = np.zeros((len(rows), -(-longest // page_size)), dtype=np.int32)
        else:
            tables = model_runner.req_to_token_pool.page_tables(rows, longest, page_size)
        metadata = AttentionMetadata.build(lens.tolist(), prefix_lens.tolist(), tables, per_token[2], device)
        return cls(
            input_ids=per_token[0],
            positions=per_token[1],
            attn_metadata=metadata,
            logits_indices=_logits_indices(batch, starts, device),
            starts=starts,
        )


OneEach = tuple[Tensor, AttentionMetadata]
"""Positions and layout of a forward over one token of each of some requests."""


def one_after_another(
    batch: NewTokens, rows: np.ndarray, places: np.ndarray, counts: np.ndarray, model_runner: HoldsTables
) -> list[OneEach]:
    """The layouts of `max(counts)` forwards over one token each: the first computes the tokens at `places`, one of each
    of `rows`, the next one those behind them. `counts[i]`, falling, tells in how many of them `rows[i]` takes part.

    All but the tokens themselves, which nobody knows yet; at once, because a small model's forward takes little longer
    than its layout.
    """
    if not len(rows):
        return []
    num_steps, device, page_size = int(counts[0]), model_runner.device, model_runner.page_size
    ends = np.cumsum(batch.new_lens)[rows]
    steps = np.arange(num_steps)[:, None]
    positions = (batch.seq_lens[rows] - (ends - places)) + steps  # [steps, rows]
    slots = batch.out_cache_loc[np.minimum(places + steps, ends - 1)]  # behind the last one of a row nobody looks
    per_token = torch.as_tensor(np.stack([positions, slots]), device=device)
    longest = int(batch.seq_lens[rows].max())
    of_requests = model_runner.req_to_token_pool.page_tables(batch.req_pool_indices[rows], longest, page_size)
    tables = torch.as_tensor(of_requests, device=device)
    layouts = []
    for step in range(num_steps):
        width = int((counts > step).sum())
        before = positions[step, :width].tolist()
        metadata = AttentionMetadata.build([1] * width, before, tables[:width], per_token[1, step, :width], device)
        layouts.append((per_token[0, step, :width], metadata))
    return layouts


def _logits_indices(batch: NewTokens, starts: np.ndarray, device: torch.device) -> Tensor | None:
    """Where the logits stand that are looked at, in the order of the batch; None: all of them, as they stand."""
    if sum(batch.sample_lens) == len(batch.input_ids) == len(starts):
        return None
    looked_at = np.array(batch.sample_lens)
    places = ranges(starts + batch.new_lens - looked_at, looked_at)
    is_all = len(places) == len(batch.input_ids) and bool((places == _numbers(len(places))).all())
    return None if is_all else torch.as_tensor(places, device=device)


@lru_cache
def _numbers(count: int) -> np.ndarray:
    """0, 1, 2, ... Nobody changes them."""
    return np.arange(count)


def ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """`starts[0], starts[0] + 1, ...` `lens[0]` times, then those of the next one. Starts 3 and 0, lengths 2 and 2: 3,
    4, 0, 1."""
    ends = np.cumsum(lens)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lens), lens)
