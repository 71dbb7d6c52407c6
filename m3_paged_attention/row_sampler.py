"""Logits to tokens inside the runner: m1's sampling step for whoever knows rows of numbers, and no requests.

In m1 and m2 the engine core sampled, with the requests at hand. Now the logits stay where they were computed, and only
tokens go back. vLLM: `_sample` in `v1/worker/gpu_model_runner.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.sampler import LogprobRow, Sampler, gather_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.sampling_step import impossible_row, not_finite, sampled_event, suspect_rows
from m1_single_request.tracer import Tracer
from m3_paged_attention.input_batch import CachedRequestState

ROWS_AT_A_TIME = 256  # of prompt logits: [rows, vocabulary] in float32 is the largest tensor of all


class RowSampler:
    """Runs the sampler once for all rows of a step."""

    def __init__(self, *, sampler: Sampler, token_text: Callable[[int], str], tracer: Tracer) -> None:
        self.sampler = sampler
        self.token_text = token_text
        self.tracer = tracer

    def __call__(
        self, states: Sequence[CachedRequestState], logits: Tensor
    ) -> tuple[list[str], list[list[int]], list[LogprobRow | None], dict[str, ForwardError]]:
        """The next token of each row of float32 `logits` `[rows, vocab]`.

        Returns parallel lists of ids, tokens and log-probabilities, and the errors of those whose row cannot be used.
        """
        errors: dict[str, ForwardError] = {}
        if any(suspects := suspect_rows(logits)):
            broken = [i for i, suspect in enumerate(suspects) if suspect and not logits[i].isfinite().all()]
            errors = {states[i].req_id: not_finite(states[i].req_id) for i in broken}
            sound = [i for i in range(len(states)) if states[i].req_id not in errors]
            states, logits = [states[i] for i in sound], logits[sound]
        if not states:
            return [], [], [], errors
        if all(state.is_plain for state in states):
            metadata = SamplingMetadata.plain(len(states), logits.device)
        else:
            rows = [state.sampling_row for state in states]
            metadata = SamplingMetadata.from_rows(rows, vocab_size=logits.shape[-1], device=logits.device)
        chosen = self.sampler(logits, metadata)
        if self.tracer:
            for i, state in enumerate(states):
                if i not in chosen.impossible_rows:
                    row = state.sampling_row
                    event = sampled_event(state.req_id, row, logits, metadata, chosen, i, self.token_text)
                    self.tracer.emit(event)
        for i in chosen.impossible_rows:
            errors[states[i].req_id] = impossible_row(states[i].req_id)
        kept = [i for i in range(len(states)) if i not in chosen.impossible_rows]
        req_ids, token_ids = [states[i].req_id for i in kept], [[chosen.token_ids[i]] for i in kept]
        return req_ids, token_ids, [chosen.logprobs[i] for i in kept], errors


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
