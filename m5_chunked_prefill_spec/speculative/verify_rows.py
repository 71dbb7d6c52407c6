"""Sampling parameters of the rows behind drafts: one row per draft, as if all drafts before it were output tokens.

Penalties depend on the output so far, `min_tokens` and random numbers on the position; so the row behind the second
draft has both drafts in its history. The rows of a step form one `SamplingMetadata`: the sampler runs once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow, bias_of, num_logprobs_of
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.row_sampler import plain_metadata
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo, metadata_of


def metadata_of_rows(
    info: SamplingBatchInfo, counts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> SamplingMetadata:
    """Return `counts[i]` rows for the i-th row of `info`: for the next token, the token after the first draft, ...

    Parameters and random numbers are on the host. Bias and history, if there is any, are made on the device, which
    takes a copy of its own.
    """
    if info.is_plain:
        return plain_metadata(sum(counts), info.device)
    repeats = np.array(counts)
    owners = np.repeat(np.arange(len(repeats)), repeats)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    positions = info.positions[owners] + offsets
    numbers = info.numbers[owners]
    draws = bias = seen = output_counts = None
    if not numbers["greedy"].all():
        draws = torch.from_numpy(uniforms([info.seeds[i] for i in owners], positions.tolist()))
    if info.bias is not None or info.seen is not None:
        places = owners, *_drafts_before(numbers, owners, offsets, drafts)
        index, *where = to_device(tuple([torch.from_numpy(each) for each in places]), info.device)
        bias = _bias(info, index, owners, positions)
        seen, output_counts = _history(info, index, where)
    return metadata_of(
        numbers,
        num_logprobs=num_logprobs_of([info.params[i] for i in owners]),
        vocab_size=info.vocab_size,
        uniforms=draws,
        bias=bias,
        seen=seen,
        output_counts=output_counts,
    )


def _bias(info: SamplingBatchInfo, index: Tensor, owners: np.ndarray, positions: np.ndarray) -> Tensor | None:
    """Return the bias of each row. Rows behind drafts may reach `min_tokens` before their request does."""
    if info.bias is None:
        return None
    bias = info.bias.index_select(0, index)
    blocked_until = info.blocked_until[owners]
    for row in np.flatnonzero((info.positions[owners] < blocked_until) & (positions >= blocked_until)).tolist():
        place = int(owners[row])
        own = bias_of([SamplingRow(info.params[place], info.seeds[place], (), ())], info.vocab_size, info.device)
        bias[row] = 0.0 if own is None else own[0]
    return bias


def _drafts_before(
    numbers: np.ndarray, owners: np.ndarray, offsets: np.ndarray, drafts: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the drafts before each row with penalties: for each, int64, the row and the token id."""
    behind = np.flatnonzero(numbers["penalised"] & (offsets > 0))
    lens = offsets[behind]
    drafted = [
        token_id for row, n in zip(owners[behind].tolist(), lens.tolist(), strict=True) for token_id in drafts[row][:n]
    ]
    return np.repeat(behind, lens), np.array(drafted, dtype=np.int64)


def _history(info: SamplingBatchInfo, index: Tensor, where: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the token history for penalties: the request's, and the drafts before each row, at `where`."""
    if info.seen is None or info.output_counts is None:
        return None, None
    seen, output_counts = info.seen.index_select(0, index), info.output_counts.index_select(0, index)
    seen[tuple(where)] = True
    output_counts.index_put_(tuple(where), output_counts.new_ones(()), accumulate=True)
    return seen, output_counts
