"""Output processor: make the `RequestOutput` of a request from its state.

Text that may still be the beginning of a stop string is held back until that is decided, so that a stream never shows
text that a stop would cut (`held_back` in `stop_checker.py` counts the characters). vLLM:
`v1/engine/output_processor.py`; SGLang does this in its detokenizer process.
"""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from m1_single_request.errors import InvalidRequestError
from m1_single_request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from m1_single_request.request import FinishError, Request
from m1_single_request.stop_checker import held_back

MAX_PROMPT_IDS = 2**16  # that the output of a rejected prompt repeats


class OutputProcessor:
    """Makes outputs; does not change the request."""

    def make_output(self, request: Request) -> RequestOutput:
        """Return the output of `request` as of now."""
        sequence, reason = request.sequence, request.finish_reason
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tuple(sequence.prompt_token_ids),
            prompt_logprobs=None
            if sequence.prompt_logprobs is None
            else tuple(row and dict(row) for row in sequence.prompt_logprobs),
            outputs=(self._completion(request),),
            finished=reason is not None,
            metrics=make_metrics(request),
            error=reason.error if isinstance(reason, FinishError) else None,
        )

    def _completion(self, request: Request) -> CompletionOutput:
        sequence, reason = request.sequence, request.finish_reason
        logprobs = None
        if request.sampling_params.logprobs is not None:
            logprobs = tuple(dict(row) for row in sequence.output_logprobs if row is not None)
        return CompletionOutput(
            index=0,
            text=self.visible_text(request),
            token_ids=tuple(sequence.output_token_ids),
            cumulative_logprob=None
            if logprobs is None
            else sum(row[t].logprob for row, t in zip(logprobs, sequence.output_token_ids, strict=True)),
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.reason,
            stop_reason=None if reason is None else reason.stop_reason,
        )

    def visible_text(self, request: Request) -> str:
        """Return the text that may be shown now, cut at a stop string; all other text once the request has finished."""
        sequence = request.sequence
        detokenizer, stops = sequence.detokenizer, sequence.sampling_params.stop
        text = detokenizer.text
        if sequence.text_end is not None:
            return text[: sequence.text_end]
        if request.finish_reason is not None:
            return text + detokenizer.tail()
        return text[: len(text) - held_back(text, stops)] if stops else text


def make_metrics(request: Request) -> RequestMetrics:
    """Return the request's times and token counts as of now."""
    return RequestMetrics(
        arrival_time=request.arrival_time,
        first_token_time=request.first_token_time,
        finished_time=request.finished_time,
        num_prompt_tokens=len(request.sequence.prompt_token_ids),
        cached_tokens=request.cached_tokens,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
        num_output_tokens=len(request.sequence.output_token_ids),
    )


def failed_output(request: Request, error: Exception) -> RequestOutput:
    """Return the output of a request whose text cannot be made: its tokens and the error."""
    prompt_ids, output_ids = tuple(request.prompt_token_ids), tuple(request.sequence.output_token_ids)
    completion = CompletionOutput(0, "", output_ids, None, None, "error")
    metrics = make_metrics(request)
    return RequestOutput(request.request_id, request.prompt, prompt_ids, None, (completion,), True, metrics, error)


def rejected_output(request_id: str, prompt: Any, error: InvalidRequestError) -> RequestOutput:
    """Return the output of a request that was not queued."""
    now, text = time.monotonic(), prompt if isinstance(prompt, str) else None
    ids = tuple(i for i in islice(prompt if isinstance(prompt, Sequence) else (), MAX_PROMPT_IDS) if isinstance(i, int))
    completion = CompletionOutput(0, "", (), None, None, "error")
    metrics = RequestMetrics(now, None, now, len(ids), 0, 0)
    return RequestOutput(request_id, text, ids, None, (completion,), True, metrics, error)
