"""Sampling inside the model runner: m1's sampling step on rows of numbers, without request objects.

In m1 and m2 the engine core sampled, with access to the requests. Now the logits stay where they were computed, and
only tokens are returned. vLLM: `_sample` in `v1/worker/gpu_model_runner.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.sampler import LogprobRow, Sampler, SamplerOutput, gather_logprobs, impossible_row, not_finite
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow as SingleSamplingRow
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.tracer import Tracer
from m3_paged_attention.events import sampled_row
from m3_paged_attention.outputs import ModelRunnerOutput

ROWS_AT_A_TIME = 256  # of prompt logits: [rows, vocabulary] in float32 is the largest tensor of all


class SamplingBatch(Protocol):
    """The rows of a step, for the trace. m3 builds them for every step (`SamplingRows`).

    m4 keeps them across steps (`SamplingBatchInfo`).
    """

    @property
    def params(self) -> Sequence[SamplingParams]:
        """Sampling parameters of each row, for the trace."""
        ...

    @property
    def positions(self) -> Sequence[int] | np.ndarray:
        """Number of output tokens of each row, for the trace."""
        ...


class SamplingRow(SingleSamplingRow):
    """m1's row, with `is_plain`."""

    @cached_property
    def is_plain(self) -> bool:
        """True if the row takes the best token of the unmodified logits, without logprobs."""
        return is_plain(self.params)


@dataclass(frozen=True)
class SamplingRows:
    """The rows of one step."""

    rows: Sequence[SamplingRow]
    vocab_size: int
    device: torch.device

    @property
    def params(self) -> list[SamplingParams]:
        return [row.params for row in self.rows]

    @property
    def positions(self) -> list[int]:
        return [len(row.output_token_ids) for row in self.rows]

    def metadata(self) -> SamplingMetadata:
        """Return all rows as tensors, on the host; if all rows are plain, cached ones on the device."""
        if all([row.is_plain for row in self.rows]):
            return plain_metadata(len(self.rows), self.device)
        return SamplingMetadata.from_rows(self.rows, vocab_size=self.vocab_size, device=torch.device("cpu"))


def is_plain(params: SamplingParams) -> bool:
    """Return whether a row takes the best token of the unmodified logits, without logprobs."""
    modified = params.has_penalties or params.logit_bias or params.min_tokens
    return params.is_greedy and not modified and params.logprobs is None


@cache
def plain_metadata(num_rows: int, device: torch.device) -> SamplingMetadata:
    """Return the metadata of `num_rows` plain rows, which have equal parameters: it is cached per number of rows."""
    return SamplingMetadata(
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
        num_logprobs=None,
    )


class RowSampler:
    """Runs the sampler once for all rows of a step."""

    def __init__(self, *, sampler: Sampler, token_text: Callable[[int], str], tracer: Tracer) -> None:
        self.sampler = sampler
        self.token_text = token_text
        self.tracer = tracer

    def __call__(
        self, req_ids: Sequence[str], batch: SamplingBatch, logits: Tensor, metadata: SamplingMetadata
    ) -> ModelRunnerOutput:
        """Sample the next token of each row of float32 `logits` `[rows, vocab]`; `req_ids` are the rows' requests."""
        is_broken = None
        if not logits.is_cpu or not math.isfinite(logits.sum()):
            logits, is_broken = without_broken_rows(logits)
        return self.rows(req_ids, batch, logits, metadata, self.sampler(logits, metadata), is_broken)

    def best(
        self, req_ids: Sequence[str], metadata: SamplingMetadata, model: Any, hidden: Tensor
    ) -> ModelRunnerOutput | None:
        """Return the tokens of plain rows as the `model` finds them in `hidden` `[rows, hidden_size]`, without logits.

        None if logits are needed: for other rows, a trace, a sampler of the user, or to tell which are not finite.
        """
        if metadata is not plain_metadata(len(req_ids), hidden.device) or self.tracer.readers:
            return None
        tokens = model.best_tokens(hidden) if type(self.sampler) is Sampler else None
        if tokens is None or min(tokens) < 0:
            return None
        return ModelRunnerOutput(list(req_ids), [[token] for token in tokens], [(None,)] * len(tokens))

    def rows(
        self,
        req_ids: Sequence[str],
        batch: SamplingBatch,
        logits: Tensor,
        metadata: SamplingMetadata,
        chosen: SamplerOutput,
        is_broken: Tensor | None,
    ) -> ModelRunnerOutput:
        """Return the sampled tokens by request; `is_broken`: bool `[rows]`, the rows whose logits are not finite."""
        errors: dict[str, ForwardError] = {}
        if is_broken is not None:
            errors = {
                req_id: not_finite(req_id) for req_id, flag in zip(req_ids, is_broken.tolist(), strict=True) if flag
            }
        for i in chosen.impossible_rows:
            errors.setdefault(req_ids[i], impossible_row(req_ids[i]))
        kept = [i for i, req_id in enumerate(req_ids) if req_id not in errors]
        for i in kept:
            self.tracer.emit(sampled_row, req_ids[i], batch, logits, metadata, chosen, i, self.token_text)
        return ModelRunnerOutput(
            req_ids=[req_ids[i] for i in kept],
            sampled_token_ids=[[chosen.token_ids[i]] for i in kept],
            logprobs=[[chosen.logprobs[i]] for i in kept],
            errors=errors,
        )


def without_broken_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the rows of `logits` `[rows, vocab]` with NaN or infinity by zeros; return also which they are, bool.

    It does not wait for a GPU. For logits on a CPU it takes less time to compute their sum first.
    """
    is_broken = ~logits.isfinite().all(dim=-1)
    return logits.masked_fill(is_broken[:, None], 0.0), is_broken


class RatedPrompt(NamedTuple):
    """A prompt whose tokens get log-probabilities."""

    req_id: str
    token_ids: Sequence[int]
    num_best: int
    hidden: Tensor  # [tokens, hidden_size]


def rate_prompts(
    prompts: Iterable[RatedPrompt], compute_logits: Callable[[Tensor], Tensor]
) -> tuple[dict[str, tuple[LogprobRow, ...]], dict[str, Exception]]:
    """Return the log-probabilities of prompts, or their errors, by request id."""
    found: dict[str, tuple[LogprobRow, ...]] = {}
    errors: dict[str, Exception] = {}
    for req_id, token_ids, num_best, hidden in prompts:
        try:
            found[req_id] = prompt_logprobs(token_ids, hidden, num_best, compute_logits)
        except ForwardError as error:
            errors[req_id] = error
    return found, errors


def prompt_logprobs(
    token_ids: Sequence[int], hidden: Tensor, num_best: int, compute_logits: Callable[[Tensor], Tensor]
) -> tuple[LogprobRow, ...]:
    """Return the log-probabilities of a prompt's tokens after the first, from its `hidden` `[tokens, hidden_size]`.

    Computes `ROWS_AT_A_TIME` rows at a time, so that all logits of a long prompt are never in memory together. Raises
    `ForwardError` for NaN or infinite logits.
    """
    targets = torch.tensor(token_ids[1:], device=hidden.device)
    found: list[LogprobRow] = []
    is_finite = True
    for start in range(0, len(targets), ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, len(targets))
        logits = compute_logits(hidden[start:end])
        is_finite = is_finite and bool(logits.isfinite().all())
        if is_finite:
            found += gather_logprobs(logits, targets[start:end], num_best)
    if not is_finite:
        raise ForwardError("the model computed NaN or infinite logits for the prompt")
    return tuple(found)
