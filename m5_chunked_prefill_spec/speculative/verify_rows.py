"""The sampling parameters of guessed positions: one row for each, as if all guesses before it had been said.

Penalties count what was said before, `min_tokens` and the random numbers go by the position; so the row behind the
second guess has a history with both guesses in it. The rows of a whole step are one `SamplingMetadata`, so that the
sampler runs once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow, bias_of
from m3_paged_attention.row_sampler import plain_metadata
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo, metadata_of


def metadata_of_rows(
    info: SamplingBatchInfo, counts: Sequence[int], guesses: Sequence[Sequence[int]]
) -> SamplingMetadata:
    """`counts[i]` rows for the i-th row of `info`: for the next token, for the one after the first guess, and so on."""
    if info.is_plain:
        return plain_metadata(sum(counts), info.device)
    repeats = np.array(counts)
    owners = np.repeat(np.arange(len(repeats)), repeats)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    positions = info.positions[owners] + offsets
    numbers = info.numbers[owners]
    draws = None
    if not numbers["greedy"].all():
        seeds = [info.seeds[i] for i in owners]
        draws = torch.from_numpy(uniforms(seeds, positions.tolist())).to(info.device)
    index = torch.from_numpy(owners).to(info.device)
    seen, output_counts = _history(info, index, numbers, owners, offsets, guesses)
    return metadata_of(
        numbers,
        num_logprobs=tuple(info.params[i].logprobs for i in owners),
        vocab_size=info.vocab_size,
        device=info.device,
        uniforms=draws,
        bias=_bias(info, index, owners, positions),
        seen=seen,
        output_counts=output_counts,
    )


def _bias(info: SamplingBatchInfo, index: Tensor, owners: np.ndarray, positions: np.ndarray) -> Tensor | None:
    """Rows behind guesses may have reached their min_tokens before their request has."""
    if info.bias is None:
        return None
    bias = info.bias.index_select(0, index)
    blocked_until = info.blocked_until[owners]
    for row in np.flatnonzero((info.positions[owners] < blocked_until) & (positions >= blocked_until)).tolist():
        place = int(owners[row])
        own = bias_of([SamplingRow(info.params[place], info.seeds[place], (), ())], info.vocab_size, info.device)
        bias[row] = 0.0 if own is None else own[0]
    return bias


def _history(
    info: SamplingBatchInfo,
    index: Tensor,
    numbers: np.ndarray,
    owners: np.ndarray,
    offsets: np.ndarray,
    guesses: Sequence[Sequence[int]],
) -> tuple[Tensor | None, Tensor | None]:
    """What penalties go by: the request's history, and the guesses before each row."""
    if info.seen is None or info.output_counts is None:
        return None, None
    seen, output_counts = info.seen.index_select(0, index), info.output_counts.index_select(0, index)
    behind = np.flatnonzero(numbers["penalised"] & (offsets > 0))
    lens = offsets[behind]
    said = [
        token_id for row, n in zip(owners[behind].tolist(), lens.tolist(), strict=True) for token_id in guesses[row][:n]
    ]
    where = (
        torch.from_numpy(np.repeat(behind, lens)).to(info.device),
        torch.tensor(said, dtype=torch.int64, device=info.device),
    )
    seen[where] = True
    output_counts.index_put_(where, output_counts.new_ones(()), accumulate=True)
    return seen, output_counts
