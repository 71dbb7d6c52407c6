"""Sample for a batch: from the rows of logits to each request's next token.

m1 sampled one row. Here the rows of all requests of a step are put together, so that the sampler runs once. A row that
cannot be used fails its own request and no other. m3 samples inside the model runner, next to the tensors.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from m1_single_request.errors import ForwardError
from m1_single_request.output_events import Sampled
from m1_single_request.request import Request
from m1_single_request.sampler import SampledTokens, Sampler, impossible_row, not_finite, prompt_logprobs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


class SamplingStep:
    """Runs the sampler once for all requests of a step; changes no request."""

    def __init__(self, *, sampler: Sampler, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.sampler = sampler
        self.stop_checker = stop_checker
        self.tracer = tracer

    def __call__(
        self, requests: Sequence[Request], logits: Mapping[str, Tensor]
    ) -> tuple[dict[str, SampledTokens], dict[str, ForwardError]]:
        """Return the next token of each request, and the errors of those that can have none, both by request id.

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
            request_id, sequence, params = request.request_id, request.sequence, request.sampling_params
            if index in chosen.impossible_rows:
                errors[request_id] = impossible_row(request_id)
                continue
            position, text = len(sequence.output_token_ids), sequence.detokenizer.token_text
            self.tracer.emit(Sampled.of, request_id, params, position, last, metadata, chosen, index, text)
            of_prompt = None
            if position == 0:
                of_prompt = prompt_logprobs(params, sequence.prompt_token_ids, logits[request_id])
            sampled[request_id] = SampledTokens((chosen.token_ids[index],), (chosen.logprobs[index],), of_prompt)
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


def _not_finite(requests: Sequence[Request], logits: Mapping[str, Tensor], last: Tensor) -> dict[str, ForwardError]:
    """Return an error for each request whose logits contain NaN or infinity. `last` `[requests, vocab]`: last rows."""
    suspects = suspect_rows(last)
    return {
        request.request_id: not_finite(request.request_id)
        for request, suspect in zip(requests, suspects, strict=True)
        if (suspect or len(logits[request.request_id]) > 1) and not logits[request.request_id].isfinite().all()
    }


def suspect_rows(logits: Tensor) -> list[bool]:
    """Return for each row of `logits` `[rows, vocab]` whether it may contain NaN or infinity: its sum is not finite."""
    return [not math.isfinite(total) for total in logits.sum(dim=-1).tolist()]
