"""The sampling parameters of a batch as tensors: one row per request that gets a token in this step.

m1 builds them again for every step. A tensor that no row uses is None, so the sampler skips it without a device
synchronisation. vLLM: `SamplingMetadata`; SGLang: `SamplingBatchInfo`, which is kept across steps (m4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.sampling_params import SamplingParams

MIN_REPETITION_PENALTY = 1e-30  # smaller ones would be zero in float32
MAX_TEMPERATURE = 1e30  # beyond this all tokens are equally likely anyway, and float32 ends at 3.4e38


@dataclass(frozen=True)
class SamplingRow:
    """The sampler's input for one row."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int] = frozenset()
    """Ids that cannot be sampled while the output has fewer than `min_tokens` tokens."""


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters of one batch; tensors are `[rows]` unless a comment differs. The sampler needs all of them on
    the logits' device."""

    greedy: Tensor  # bool
    all_greedy: bool
    temperature: Tensor  # float32; 1 in greedy rows
    uniforms: Tensor | None  # float64: the row's random number; None if all rows are greedy
    min_p: Tensor | None
    top_k: Tensor | None  # int64; the vocabulary size where a row keeps all tokens
    top_p: Tensor | None
    bias: Tensor | None  # float32 [rows, vocab]: logit_bias, and -inf on stop ids before min_tokens
    penalties: tuple[Tensor, Tensor, Tensor] | None  # repetition, frequency, presence
    seen: Tensor | None  # bool [rows, vocab]: in prompt or output; only rows with penalties
    output_counts: Tensor | None  # float32 [rows, vocab]: occurrences in the output; only rows with penalties
    num_logprobs: tuple[int | None, ...] | None  # None if no row asks for log-probabilities

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], *, vocab_size: int, device: torch.device) -> "SamplingMetadata":
        """Build the tensors from the parameters of all rows, one or more."""
        params = [row.params for row in rows]
        greedy = [p.is_greedy for p in params]
        temperature, min_p, top_k, top_p = zip(*(choice_of(p, vocab_size) for p in params), strict=True)
        has_penalties, penalties = any([p.has_penalties for p in params]), None
        draws = None if all(greedy) else uniforms([r.seed for r in rows], [len(r.output_token_ids) for r in rows])

        def tensor(values: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        if has_penalties:
            repetition, frequency, presence = zip(*(penalties_of(p) for p in params), strict=True)
            penalties = tensor(repetition), tensor(frequency), tensor(presence)
        return cls(
            greedy=tensor(greedy, torch.bool),
            all_greedy=all(greedy),
            temperature=tensor(temperature),
            uniforms=None if draws is None else torch.from_numpy(draws).to(device),
            min_p=tensor(min_p) if any(min_p) else None,
            top_k=tensor(top_k, torch.int64) if min(top_k) < vocab_size else None,
            top_p=tensor(top_p) if min(top_p) < 1 else None,
            bias=bias_of(rows, vocab_size, device),
            penalties=penalties,
            seen=seen_by(rows, vocab_size, device) if has_penalties else None,
            output_counts=output_counts_of(rows, vocab_size, device) if has_penalties else None,
            num_logprobs=num_logprobs_of(params),
        )


def choice_of(params: SamplingParams, vocab_size: int) -> tuple[float, float, int, float]:
    """Return temperature, min_p, top_k and top_p of a row: values that keep every token if it is greedy."""
    if params.is_greedy:
        return 1.0, 0.0, vocab_size, 1.0
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    return min(params.temperature, MAX_TEMPERATURE), params.min_p, top_k, params.top_p


def num_logprobs_of(params: Sequence[SamplingParams]) -> tuple[int | None, ...] | None:
    """Return the number of log-probabilities that each row asks for; None if no row does."""
    asked = tuple([p.logprobs for p in params])
    return asked if any([k is not None for k in asked]) else None


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """Return the repetition, frequency and presence penalty of a row."""
    repetition = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
    return repetition, params.frequency_penalty, params.presence_penalty


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; on a CPU it is the same one.

    To a GPU it is copied from pinned memory: a copy from other memory waits until the GPU has done all earlier work.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def bias_of(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the bias to add to the logits, float32 `[rows, vocab]`; None if no row has one.

    It is `logit_bias`, and -inf for stop ids before `min_tokens`.
    """
    blocked = [row.stop_ids if len(row.output_token_ids) < row.params.min_tokens else frozenset() for row in rows]
    if not any(blocked) and not any([row.params.logit_bias for row in rows]):
        return None
    bias = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        for token_id, value in (row.params.logit_bias or {}).items():
            bias[i, token_id] = value
        bias[i, list(blocked[i])] = -torch.inf
    return sent(bias, device)


def seen_by(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask of the tokens in prompt or output, bool `[rows, vocab]`; False in rows without penalties."""
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row.params.has_penalties:
            seen[i, torch.tensor([*row.prompt_token_ids, *row.output_token_ids])] = True
    return sent(seen, device)


def output_counts_of(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor:
    """Return the count of each token in the output, float32 `[rows, vocab]`; 0 in rows without penalties."""
    counts = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        if row.params.has_penalties and row.output_token_ids:
            counts[i] = torch.bincount(torch.tensor(row.output_token_ids), minlength=vocab_size)
    return sent(counts, device)
