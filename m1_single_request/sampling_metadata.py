"""The sampling parameters of a batch as tensors: one row per request that gets a token in this step.

Built anew for every step in m1. What no row uses is None, so that the sampler skips it without asking the device.
vLLM: `SamplingMetadata`; SGLang: `SamplingBatchInfo`, which lives across steps (m4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from m1_single_request.draws import uniforms
from m1_single_request.sampling_params import SamplingParams

MIN_REPETITION_PENALTY = 1e-30  # smaller ones would be zero in float32
MAX_TEMPERATURE = 1e30  # beyond this all tokens are equally likely anyway, and float32 ends at 3.4e38


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one row."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_ids: frozenset[int] = frozenset()
    """Ids that may not be sampled while fewer than `min_tokens` tokens are out."""

    @cached_property
    def is_plain(self) -> bool:
        """Whether the best token is taken from the untouched logits, and nothing else is asked for."""
        params = self.params
        touched = params.has_penalties or params.logit_bias or params.min_tokens
        return params.is_greedy and not touched and params.logprobs is None


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters of one batch; all tensors on the logits' device, `[rows]` unless a comment says otherwise."""

    greedy: Tensor  # bool
    all_greedy: bool
    temperature: Tensor  # float32; 1 in greedy rows
    uniforms: Tensor | None  # float64: the row's random number; None if all rows are greedy
    min_p: Tensor | None
    top_k: Tensor | None  # int64; the vocabulary size where a row keeps all
    top_p: Tensor | None
    bias: Tensor | None  # float32 [rows, vocab]: logit_bias, and -inf on stop ids before min_tokens
    penalties: tuple[Tensor, Tensor, Tensor] | None  # repetition, frequency, presence
    seen: Tensor | None  # bool [rows, vocab]: in prompt or output; with penalties only
    output_counts: Tensor | None  # float32 [rows, vocab]: times in the output; with penalties only
    num_logprobs: tuple[int | None, ...]

    @classmethod
    @lru_cache
    def plain(cls, num_rows: int, device: torch.device) -> "SamplingMetadata":
        """For rows that all take the best token of the untouched logits and ask for nothing else.

        Such rows differ in nothing, so there is one for each number of them.
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
        """Gather the rows' parameters into tensors."""
        params = [row.params for row in rows]
        greedy = [p.is_greedy for p in params]
        drawn = [p for p in params if not p.is_greedy]

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        has_penalties = any(p.has_penalties for p in params)
        return cls(
            greedy=column(greedy, torch.bool),
            all_greedy=all(greedy),
            temperature=column(
                [1.0 if g else min(p.temperature, MAX_TEMPERATURE) for g, p in zip(greedy, params, strict=True)]
            ),
            uniforms=_draws(rows, device) if drawn else None,
            min_p=column([p.min_p for p in params]) if any(p.min_p > 0 for p in drawn) else None,
            top_k=column(top_k, torch.int64) if any(0 < p.top_k < vocab_size for p in drawn) else None,
            top_p=column([p.top_p for p in params]) if any(p.top_p < 1 for p in drawn) else None,
            bias=_bias(rows, vocab_size, device),
            penalties=(
                column([max(p.repetition_penalty, MIN_REPETITION_PENALTY) for p in params]),
                column([p.frequency_penalty for p in params]),
                column([p.presence_penalty for p in params]),
            )
            if has_penalties
            else None,
            seen=_seen(rows, vocab_size, device) if has_penalties else None,
            output_counts=_output_counts(rows, vocab_size, device) if has_penalties else None,
            num_logprobs=tuple(p.logprobs for p in params),
        )


def _draws(rows: Sequence[SamplingRow], device: torch.device) -> Tensor:
    draws = uniforms([row.seed for row in rows], [len(row.output_token_ids) for row in rows])
    return torch.from_numpy(draws).to(device)


def _bias(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor | None:
    blocked = [row.stop_ids if len(row.output_token_ids) < row.params.min_tokens else frozenset() for row in rows]
    if not any(blocked) and not any(row.params.logit_bias for row in rows):
        return None
    bias = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        for token_id, value in (row.params.logit_bias or {}).items():
            bias[i, token_id] = value
        bias[i, list(blocked[i])] = -torch.inf
    return bias.to(device)


def _seen(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor:
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, torch.tensor([*row.prompt_token_ids, *row.output_token_ids])] = True
    return seen.to(device)


def _output_counts(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor:
    counts = torch.zeros(len(rows), vocab_size)
    for i, row in enumerate(rows):
        if row.output_token_ids:
            counts[i] = torch.bincount(torch.tensor(row.output_token_ids), minlength=vocab_size)
    return counts.to(device)
