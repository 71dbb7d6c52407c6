"""Logits to tokens inside the runner: m1's sampling step for whoever knows rows of numbers, and no requests.

In m1 and m2 the engine core sampled, with the requests at hand. Now the logits stay where they were computed, and only
tokens go back. vLLM: `_sample` in `v1/worker/gpu_model_runner.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.sampler import LogprobRow, Sampler, gather_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.sampling_step import impossible_row, not_finite, sampled_event, suspect_rows
from m1_single_request.tracer import Tracer

ROWS_AT_A_TIME = 256  # of prompt logits: [rows, vocabulary] in float32 is the largest tensor of all


class SampledRows(NamedTuple):
    """What came of a step's rows: parallel lists for those that have a token, and the errors of the others."""

    req_ids: list[str]
    token_ids: list[list[int]]
    logprobs: list[LogprobRow | None]
    errors: dict[str, ForwardError]


class RowSampler:
    """Runs the sampler once for all rows of a step."""

    def __init__(self, *, sampler: Sampler, token_text: Callable[[int], str], tracer: Tracer) -> None:
        self.sampler = sampler
        self.token_text = token_text
        self.tracer = tracer

    def __call__(self, req_ids: Sequence[str], rows: Sequence[SamplingRow], logits: Tensor) -> SampledRows:
        """The next token of each row of float32 `logits` `[rows, vocab]`, of which each is some request's."""
        errors: dict[str, ForwardError] = {}
        if any(suspects := suspect_rows(logits)):
            broken = {i for i, suspect in enumerate(suspects) if suspect and not logits[i].isfinite().all()}
            errors = {req_ids[i]: not_finite(req_ids[i]) for i in sorted(broken)}
            sound = [i for i in range(len(rows)) if i not in broken]
            req_ids, rows, logits = [req_ids[i] for i in sound], [rows[i] for i in sound], logits[sound]
        if not rows:
            return SampledRows([], [], [], errors)
        if all([row.is_plain for row in rows]):
            metadata = SamplingMetadata.plain(len(rows), logits.device)
        else:
            metadata = SamplingMetadata.from_rows(rows, vocab_size=logits.shape[-1], device=logits.device)
        chosen = self.sampler(logits, metadata)
        kept = [i for i in range(len(rows)) if i not in chosen.impossible_rows]
        if self.tracer:
            for i in kept:
                event = sampled_event(req_ids[i], rows[i], logits, metadata, chosen, i, self.token_text)
                self.tracer.emit(event)
        return SampledRows(
            req_ids=[req_ids[i] for i in kept],
            token_ids=[[chosen.token_ids[i]] for i in kept],
            logprobs=[chosen.logprobs[i] for i in kept],
            errors=errors | {req_ids[i]: impossible_row(req_ids[i]) for i in chosen.impossible_rows},
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
