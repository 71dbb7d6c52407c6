"""A batch on the device, in which requests may have any number of new tokens, in any order.

m4's batches held prompts or decodes, sorted already. Here a decode with drafts has several tokens in one step and one
in the next. So the rows of a batch keep their order from step to step, and only the layout on the device puts requests
with more than one new token first. `logits_indices` are in the order of the batch. SGLang: `ForwardBatch.init_new`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.model_input import ModelInput
from m4_radix_cache.forward_batch import HoldsTables


class NewTokens(Protocol):
    """Input of a forward: the new tokens of some requests, one request after the other."""

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
        """Number of each request's last new tokens whose logits are needed."""
        ...


@dataclass(frozen=True)
class SomeTokens:
    """New tokens of a forward that is not a step of the engine: of a draft model, or of a measurement."""

    input_ids: np.ndarray
    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    new_lens: np.ndarray
    out_cache_loc: np.ndarray
    sample_lens: Sequence[int]


def nothing_in_page_0(num_rows: int, num_tokens: int, context: int, page_size: int) -> SomeTokens:
    """Return placeholder tokens for a measurement: `num_rows` times `num_tokens` behind `context` others.

    Their KV is written to page 0, which no request reads.
    """
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
"""Placeholder for a row of slots: all its tokens lie in page 0."""


@dataclass(eq=False)
class ForwardBatch(ModelInput):
    """Tensors of one forward, and of its sampling. Made for each step, on the host, and never changed."""

    starts: np.ndarray
    """int64 `[batch_size]`: start of each request's tokens in this layout."""
    sampling: SamplingMetadata | None
    """The rows whose tokens are sampled; None in a forward without sampling."""

    @classmethod
    def init_new(
        cls, batch: NewTokens, model_runner: HoldsTables, sampling: SamplingMetadata | None = None
    ) -> "ForwardBatch":
        """Return the layout of a batch; `to_device` moves it."""
        if len(batch.input_ids) == len(batch.seq_lens):  # one token each, as in most steps: any order is valid
            starts, input_ids, positions = _numbers(len(batch.seq_lens)), batch.input_ids, batch.seq_lens - 1
            tables = _page_tables(batch.req_pool_indices, batch.seq_lens, model_runner)
            metadata = AttentionMetadata.of_decodes(batch.seq_lens, tables, batch.out_cache_loc)
        else:
            rows, lens, prefix_lens, starts, columns = _in_layout_order(batch)
            input_ids, positions, slots = columns
            tables = _page_tables(rows, batch.seq_lens, model_runner)
            metadata = AttentionMetadata.build(lens.tolist(), prefix_lens.tolist(), tables, slots)
        return cls(
            torch.from_numpy(input_ids),
            torch.from_numpy(positions),
            metadata,
            logits_indices=_logits_indices(batch, starts),
            starts=starts,
            sampling=sampling,
        )


def _page_tables(rows: np.ndarray, seq_lens: np.ndarray, model_runner: HoldsTables) -> np.ndarray:
    """Return the block tables of `rows`, int32 `[len(rows), pages]`; all 0 for `NO_ROW`."""
    longest, page_size = max(seq_lens.tolist()), model_runner.page_size
    if rows[0] == NO_ROW:
        return np.zeros((len(rows), -(-longest // page_size)), dtype=np.int32)
    return model_runner.req_to_token_pool.page_tables(rows, longest, page_size)


class _Layout(NamedTuple):
    """A batch in the order of the layout: requests with several new tokens first. All but `starts` are in this order.

    `rows`, `lens`, `prefix_lens` have one entry per request, each of `columns` (ids, positions, slots) one per token.
    """

    rows: np.ndarray
    lens: np.ndarray
    prefix_lens: np.ndarray
    starts: np.ndarray  # start of each request's tokens in the layout, in the order of the batch
    columns: list[np.ndarray]


def _in_layout_order(batch: NewTokens) -> _Layout:
    """Return the rows and tokens of a batch, requests with several new tokens first."""
    rows, lens = batch.req_pool_indices, batch.new_lens
    prefix_lens = batch.seq_lens - lens
    is_alone = lens == 1
    begins = np.cumsum(lens) - lens  # of each request's tokens in the batch
    if (is_alone[:-1] <= is_alone[1:]).all():  # prompts before decodes: the batch has the order of the layout
        columns = [batch.input_ids, ranges(prefix_lens, lens), batch.out_cache_loc]
        return _Layout(rows, lens, prefix_lens, begins, columns)
    order = np.argsort(is_alone, kind="stable")  # of the rows in the layout
    lens, prefix_lens = lens[order], prefix_lens[order]
    starts = np.empty_like(lens)
    starts[order] = np.cumsum(lens) - lens
    places = ranges(begins[order], lens)  # index in the batch of each token of the layout
    columns = [batch.input_ids[places], ranges(prefix_lens, lens), batch.out_cache_loc[places]]
    return _Layout(rows[order], lens, prefix_lens, starts, columns)


OneEach = tuple[Tensor, AttentionMetadata]
"""Positions and layout of a forward over one token of each of some requests."""


def one_after_another(
    batch: NewTokens, rows: np.ndarray, places: np.ndarray, counts: np.ndarray, model_runner: HoldsTables
) -> tuple[OneEach, ...]:
    """Return the layouts of `max(counts)` forwards over one token of each row.

    The first forward computes the tokens at `places`, one of each of `rows`; each further one computes the tokens
    behind them. `rows[i]` is in the first `counts[i]` forwards; `counts` never rises. The token ids, not known yet, are
    left out. All layouts are made at once: for a small model, a layout takes almost as long as a forward.
    """
    if not len(rows):
        return ()
    num_steps, page_size = int(counts[0]), model_runner.page_size
    ends = np.cumsum(batch.new_lens)[rows]
    steps = np.arange(num_steps)[:, None]
    positions = (batch.seq_lens[rows] - (ends - places)) + steps  # [steps, rows]
    slots = batch.out_cache_loc[np.minimum(places + steps, ends - 1)]  # those behind the end of a row are not read
    longest = int(batch.seq_lens[rows].max())
    tables = model_runner.req_to_token_pool.page_tables(batch.req_pool_indices[rows], longest, page_size)
    layouts = []
    for step in range(num_steps):
        width = int((counts > step).sum())
        before = positions[step, :width].tolist()
        metadata = AttentionMetadata.build([1] * width, before, tables[:width], slots[step, :width])
        layouts.append((torch.from_numpy(positions[step, :width]), metadata))
    return tuple(layouts)


def _logits_indices(batch: NewTokens, starts: np.ndarray) -> Tensor | None:
    """Return the indices in the layout of the tokens whose logits are needed, in the order of the batch.

    None: all of them, in the order of the layout.
    """
    if sum(batch.sample_lens) == len(batch.input_ids) == len(starts):
        return None
    num_rows = np.array(batch.sample_lens)
    places = ranges(starts + batch.new_lens - num_rows, num_rows)
    is_all = len(places) == len(batch.input_ids) and bool((places == _numbers(len(places))).all())
    return None if is_all else torch.from_numpy(places)


@lru_cache
def _numbers(count: int) -> np.ndarray:
    """Return `0, 1, ..., count - 1`, shared by all callers: do not change it."""
    return np.arange(count)


def ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Return the numbers from `starts[i]` to `starts[i] + lens[i] - 1` for each `i`, one range after the other.

    Starts 3 and 0 with lengths 2 and 2 give 3, 4, 0, 1.
    """
    ends = np.cumsum(lens)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lens), lens)
