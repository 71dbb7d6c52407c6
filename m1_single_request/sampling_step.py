"""Step 4 of the loop, for any number of requests: from the rows of logits to each request's next token.

The sampler knows rows of numbers only. Here the rows of all requests of a step are put together, the requests'
parameters become `SamplingMetadata`, and what comes back is sorted by request again. A row that cannot be used fails
its own request and no other. m3 samples inside the model runner, next to the tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m1_single_request.errors import ForwardError, shown
from m1_single_request.output_events import Sampled
from m1_single_request.request import Request
from m1_single_request.sampler import LogprobRow, Sampler, gather_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


@dataclass(frozen=True)
class SampledTokens:
    """What the sampler chose for one request in one step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobRow | None, ...]
    prompt_logprobs: tuple[LogprobRow, ...] | None = None
    """For the prompt's tokens after the first; with the prefill, where asked for."""


class SamplingStep:
    """Runs the sampler once for all requests of a step; changes no request."""

    def __init__(self, *, sampler: Sampler, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.sampler = sampler
        self.stop_checker = stop_checker
        self.tracer = tracer

    def __call__(
        self, requests: Sequence[Request], logits: Mapping[str, Tensor]
    ) -> tuple[dict[str, SampledTokens], dict[str, ForwardError]]:
        """The next token of each request, and the errors of those that can have none, both by request id.

        `logits[request_id]` is float32 `[positions, vocab]`: its last row gives the next token; the rows before it are
        there if the prompt's logprobs were asked for, and give these.
        """
        last = torch.stack([logits[request.request_id][-1] for request in requests])  # [requests, vocab]
        errors = _not_finite(requests, logits, last)
        if errors:
            sound = [i for i, request in enumerate(requests) if request.request_id not in errors]
            requests, last = [requests[i] for i in sound], last[sound]
        sampled: dict[str, SampledTokens] = {}
        if not requests:
            return sampled, errors
        rows = [self._row(request) for request in requests]
        metadata = SamplingMetadata.from_rows(rows, vocab_size=last.shape[-1], device=last.device)
        chosen = self.sampler(last, metadata)
        for index, request in enumerate(requests):
            request_id = request.request_id
            if index in chosen.impossible_rows:
                errors[request_id] = impossible_row(request_id)
                continue
            params, sequence = request.sampling_params, request.sequence
            position, text = len(sequence.output_token_ids), sequence.detokenizer.token_text
            self.tracer.emit(Sampled.of, request_id, params, position, last, metadata, chosen, index, text)
            sampled[request_id] = SampledTokens(
                (chosen.token_ids[index],), (chosen.logprobs[index],), prompt_logprobs(request, logits[request_id])
            )
        return sampled, errors

    def _row(self, request: Request) -> SamplingRow:
        sequence = request.sequence
        return SamplingRow(
            params=request.sampling_params,
            seed=request.seed,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            stop_ids=self.stop_checker.stop_ids(sequence),
        )


def prompt_logprobs(request: Request, logits: Tensor) -> tuple[LogprobRow, ...] | None:
    """The rows for the prompt's tokens after the first; None where they were not asked for or not computed now."""
    k = request.sampling_params.prompt_logprobs
    if k is None or request.sequence.get_output_len() > 0:
        return None
    targets = torch.tensor(request.prompt_token_ids[1:], device=logits.device)
    return tuple(gather_logprobs(logits[:-1], targets, k)) if len(targets) else ()


def _not_finite(requests: Sequence[Request], logits: Mapping[str, Tensor], last: Tensor) -> dict[str, ForwardError]:
    """An error for every request whose logits contain NaN or infinity. `last` `[requests, vocab]` are its last rows."""
    suspects = suspect_rows(last)
    return {
        request.request_id: not_finite(request.request_id)
        for request, suspect in zip(requests, suspects, strict=True)
        if (suspect or len(logits[request.request_id]) > 1) and not logits[request.request_id].isfinite().all()
    }


def suspect_rows(logits: Tensor) -> list[bool]:
    """For each row of `logits` `[rows, vocab]`: it may hold NaN or infinity (finite numbers can have such a sum)."""
    return [not math.isfinite(total) for total in logits.sum(dim=-1).tolist()]


def not_finite(request_id: str) -> ForwardError:
    """The error of a request whose logits are no numbers."""
    return ForwardError(f"the model computed NaN or infinite logits for request {shown(request_id)}")


def impossible_row(request_id: str) -> ForwardError:
    """The error of a request whose settings forbid every token."""
    return ForwardError(
        f"no token can be sampled for {shown(request_id)}: its settings leave every token at probability zero"
    )
