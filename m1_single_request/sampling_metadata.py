"""The sampling parameters of a batch as tensors: one row per request that gets a token in this step.

m1 builds them again for every step. A tensor that no row uses is None, so the sampler skips it without a device
synchronisation. vLLM: `SamplingMetadata`; SGLang: `SamplingBatchInfo`, which is kept across steps (m4, with the same
functions).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.sampling_params import SamplingParams

MIN_REPETITION_PENALTY = 1e-30  # smaller ones would be zero in float32
MAX_TEMPERATURE = 1e30  # beyond this all tokens are equally likely anyway, and float32 ends at 3.4e38


NUMBERS = np.dtype(
    [
        ("greedy", np.bool_),
        ("temperature", np.float32),  # 1 in greedy rows, whose filters keep every token
        ("min_p", np.float32),
        ("top_k", np.int64),  # the vocabulary size where all tokens are kept
        ("top_p", np.float32),
        ("penalised", np.bool_),  # True if any of the next three changes a logit
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
    ]
)
"""The numeric sampling parameters of one row."""


def numbers_of(params: Sequence[SamplingParams], vocab_size: int) -> np.ndarray:
    """Return the parameters as `NUMBERS`, one record per row."""
    return np.array([(*_choice(p, vocab_size), *_penalties(p)) for p in params], dtype=NUMBERS)


def _choice(params: SamplingParams, vocab_size: int) -> tuple[bool, float, float, int, float]:
    if params.is_greedy:
        return True, 1.0, 0.0, vocab_size, 1.0
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    return False, min(params.temperature, MAX_TEMPERATURE), params.min_p, top_k, params.top_p


def _penalties(params: SamplingParams) -> tuple[bool, float, float, float]:
    repetition = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
    return params.has_penalties, repetition, params.frequency_penalty, params.presence_penalty


@dataclass(frozen=True)
class SamplingRow:
    """The sampler's input for one row."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int] = frozenset()
    """Ids that cannot be sampled while the output has fewer than `min_tokens` tokens."""

    @cached_property
    def is_plain(self) -> bool:
        """True for a greedy row with unmodified logits and without logprobs."""
        params = self.params
        modified = params.has_penalties or params.logit_bias or params.min_tokens
        return params.is_greedy and not modified and params.logprobs is None


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters of one batch. All tensors are on the logits' device, `[rows]` unless a comment differs."""

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
    num_logprobs: tuple[int | None, ...]

    @classmethod
    @lru_cache
    def plain(cls, num_rows: int, device: torch.device) -> "SamplingMetadata":
        """Return the metadata of `num_rows` plain rows (`SamplingRow.is_plain`).

        Plain rows have equal parameters, so the result is cached per number of rows.
        """
        return cls(
            greedy=torch.ones(num_rows, dtype=torch.bool, device=device),
            all_greedy=True,
            temperature=torch.ones(num_rows, device=device),
            uniforms=None,
            min_p=None,
            top_k=None,
            top_p=None,
            bias=None,
            penalties=None,
            seen=None,
            output_counts=None,
            num_logprobs=(None,) * num_rows,
        )

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], *, vocab_size: int, device: torch.device) -> "SamplingMetadata":
        """Build the tensors from the parameters of all rows."""
        params = [row.params for row in rows]
        numbers = numbers_of(params, vocab_size)
        return cls.from_numbers(
            numbers,
            num_logprobs=tuple(p.logprobs for p in params),
            vocab_size=vocab_size,
            device=device,
            uniforms=None if numbers["greedy"].all() else _draws(rows, device),
            bias=bias_of(rows, vocab_size, device),
            seen=seen_by(rows, vocab_size, device),
            output_counts=output_counts_of(rows, vocab_size, device),
        )

    @classmethod
    def from_numbers(
        cls,
        numbers: np.ndarray,
        *,
        num_logprobs: tuple[int | None, ...],
        vocab_size: int,
        device: torch.device,
        uniforms: Tensor | None,
        bias: Tensor | None,
        seen: Tensor | None,
        output_counts: Tensor | None,
    ) -> "SamplingMetadata":
        """Build the tensors from `NUMBERS` `[rows]`; the caller passes those that depend on the tokens so far."""

        def column(name: str) -> Tensor:
            return torch.from_numpy(numbers[name].copy()).to(device)

        def penalties() -> tuple[Tensor, Tensor, Tensor]:
            return column("repetition_penalty"), column("frequency_penalty"), column("presence_penalty")

        return cls(
            greedy=column("greedy"),
            all_greedy=bool(numbers["greedy"].all()),
            temperature=column("temperature"),
            uniforms=uniforms,
            min_p=column("min_p") if (numbers["min_p"] > 0).any() else None,
            top_k=column("top_k") if (numbers["top_k"] < vocab_size).any() else None,
            top_p=column("top_p") if (numbers["top_p"] < 1).any() else None,
            bias=bias,
            penalties=penalties() if numbers["penalised"].any() else None,
            seen=seen,
            output_counts=output_counts,
            num_logprobs=num_logprobs,
        )


def _draws(rows: Sequence[SamplingRow], device: torch.device) -> Tensor:
    draws = uniforms([row.seed for row in rows], [len(row.output_token_ids) for row in rows])
    return torch.from_numpy(draws).to(device)


def bias_of(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the bias to add to the logits, float32 `[rows, vocab]`; None if no row has one.

    It is `logit_bias`, and -inf for stop ids before `min_tokens`.
    """
    blocked = [row.stop_ids if len(row.output_token_ids) < row.params.min_tokens else frozenset() for row in rows]
    if not any(blocked) and not any(row.params.logit_bias for row in rows):
        return None
    bias = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        for token_id, value in (row.params.logit_bias or {}).items():
            bias[i, token_id] = value
        bias[i, list(blocked[i])] = -torch.inf
    return bias.to(device)


def seen_by(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return a mask of the tokens in prompt or output, bool `[rows, vocab]`; None if no row has penalties.

    It is False in rows without penalties.
    """
    if not any(row.params.has_penalties for row in rows):
        return None
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row.params.has_penalties:
            seen[i, torch.tensor([*row.prompt_token_ids, *row.output_token_ids])] = True
    return seen.to(device)


def output_counts_of(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the count of each token in the output, float32 `[rows, vocab]`; zeros and None as in `seen_by`."""
    if not any(row.params.has_penalties for row in rows):
        return None
    counts = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        if row.params.has_penalties and row.output_token_ids:
            counts[i] = torch.bincount(torch.tensor(row.output_token_ids), minlength=vocab_size)
    return counts.to(device)
