"""Logits to tokens inside the runner: m1's sampling step for whoever knows rows of numbers, and no requests.

In m1 and m2 the engine core sampled, with the requests at hand. Now the logits stay where they were computed, and only
tokens go back. vLLM: `_sample` in `v1/worker/gpu_model_runner.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.sampler import LogprobRow, Sampler, gather_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.sampling_step import impossible_row, not_finite, sampled_event, suspect_rows
from m1_single_request.tracer import Tracer

ROWS_AT_A_TIME = 256  # of prompt logits: [rows, vocabulary] in float32 is the largest tensor of all


class SamplingBatch(Protocol):
    """What the sampler must know of a step's rows. Here they are looked up anew for every step (`SamplingRows`).

    m4 keeps them from step to step (`SamplingBatchInfo`).
    """

    @property
    def params(self) -> Sequence[SamplingParams]:
        """Each row's settings; for the trace."""
        ...

    @property
    def positions(self) -> Sequence[int] | np.ndarray:
        """How many output tokens each row has; for the trace."""
        ...

    def metadata(self) -> SamplingMetadata:
        """All rows as tensors, for this step."""
        ...


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
        """All rows as tensors; the shared ones if nothing but the best tokens are asked for."""
        if all([row.is_plain for row in self.rows]):
            return SamplingMetadata.plain(len(self.rows), self.device)
        return SamplingMetadata.from_rows(self.rows, vocab_size=self.vocab_size, device=self.device)


class SampledRows(NamedTuple):
    """What came of a step's rows: parallel lists for those that have a token, and the errors of the others."""

    req_ids: list[str]
    token_ids: list[list[int]]
    logprobs: list[Sequence[LogprobRow | None]]
    errors: dict[str, ForwardError]


class RowSampler:
    """Runs the sampler once for all rows of a step."""

    def __init__(self, *, sampler: Sampler, token_text: Callable[[int], str], tracer: Tracer) -> None:
        self.sampler = sampler
        self.token_text = token_text
        self.tracer = tracer

    def __call__(self, req_ids: Sequence[str], batch: SamplingBatch, logits: Tensor) -> SampledRows:
        """The next token of each row of float32 `logits` `[rows, vocab]`, of which each is some request's."""
        errors: dict[str, ForwardError] = {}
        suspects = [i for i, suspect in enumerate(suspect_rows(logits)) if suspect]
        if broken := [i for i in suspects if not logits[i].isfinite().all()]:
            errors = {req_ids[i]: not_finite(req_ids[i]) for i in broken}
            logits = logits.index_fill(0, torch.tensor(broken, device=logits.device), 0.0)  # any numbers will do
        metadata = batch.metadata()
        chosen = self.sampler(logits, metadata)
        impossible = [req_ids[i] for i in chosen.impossible_rows if req_ids[i] not in errors]
        errors |= {req_id: impossible_row(req_id) for req_id in impossible}
        kept = [i for i, req_id in enumerate(req_ids) if req_id not in errors]
        if self.tracer:
            params, positions, text = batch.params, batch.positions, self.token_text
            for i in kept:
                position = int(positions[i])
                event = sampled_event(req_ids[i], params[i], position, logits, metadata, chosen, i, text)
                self.tracer.emit(event)
        return SampledRows(
            req_ids=[req_ids[i] for i in kept],
            token_ids=[[chosen.token_ids[i]] for i in kept],
            logprobs=[[chosen.logprobs[i]] for i in kept],
            errors=errors,
        )


def prompt_logprobs(
    token_ids: Sequence[int], hidden: Tensor, num_best: int, compute_logits: Callable[[Tensor], Tensor]
) -> tuple[LogprobRow, ...]:
    """The log-probabilities of a prompt's tokens after the first, from its `hidden` `[tokens, hidden_size]`.

    Some rows at a time, so that the logits of a long prompt never stand in memory together. Raises `ForwardError` at
    NaN or infinity.
    """
    targets = torch.tensor(token_ids[1:], device=hidden.device)
    found: list[LogprobRow] = []
    for start in range(0, len(targets), ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, len(targets))
        logits = compute_logits(hidden[start:end])
        if not logits.isfinite().all():
            raise ForwardError("the model computed NaN or infinite logits for the prompt")
        found += gather_logprobs(logits, targets[start:end], num_best)
    return tuple(found)
