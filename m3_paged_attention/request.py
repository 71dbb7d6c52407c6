"""Requests with siblings: `n > 1` generates several continuations of one prompt.

Each continuation is a separate request, `rid/0`, `rid/1`, ..., with its own seed, text and end. The scheduler treats it
like any other, except that it may start with the KV blocks of a sibling. `ParentRequest` is the caller's request: it is
never scheduled, and collects its children's results and its finish reason: that of the first child that failed, or of
the first child. New in m3; vLLM: `ParentRequest` in `v1/engine/parallel_sampling.py`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from m1_single_request.request import FinishError, Request as SingleRequest, RequestStatus, Sequence


class SimpleStops(NamedTuple):
    """The whole stop condition of a request without stop strings, log-probabilities and a minimum length ahead."""

    stop_ids: frozenset[int]
    """The ids that end it."""
    num_output: int
    """Number of output tokens at which it ends."""


class Request(SingleRequest):
    """m1's request, with the fields of m3's scheduler."""

    parent_id: str | None = None
    """Id of the parent of a continuation."""
    is_sent: bool = False
    """True if a step has sent the request's tokens and blocks to the runner, so that only changes are sent."""
    number: int = 0
    """Number of the request in the order of arrival."""
    simple_stops: SimpleStops | None = None
    """The whole stop condition, if it consists of ids and a length only."""


class ParentRequest(SingleRequest):
    """Several continuations of one prompt, reported as one request with the sum of their output tokens.

    Children: any class with a `parent_id`.
    """

    def __init__(self, children: list[Any], *, request_id: str) -> None:
        first = children[0]
        super().__init__(request_id, first.prompt, first.sequence, first.seed, first.arrival_time)
        self.children = children
        for child in children:
            child.parent_id = request_id

    def reassign_prompt_logprobs(self) -> None:
        """Select another child to compute the prompt's log-probabilities if the first one was aborted before that."""
        num_best = self.sampling_params.prompt_logprobs  # of the first child
        alive = [child for child in self.children if child.to_finish is None and not child.is_finished]
        if num_best is None or self._with_prompt_logprobs() is not None:
            return
        candidates = [child for child in alive if not child.sequence.get_output_len()]
        if candidates and all(child.sampling_params.prompt_logprobs is None for child in alive):
            candidates[0].sampling_params = replace(candidates[0].sampling_params, prompt_logprobs=num_best)

    def _with_prompt_logprobs(self) -> Sequence | None:
        """Return the sequence that has the prompt's log-probabilities, or None."""
        return next((c.sequence for c in self.children if c.sequence.has_prompt_logprobs), None)

    def update_from_children(self) -> None:
        """Update times and token counts from the children; finish when the last child has finished."""
        if self.sampling_params.prompt_logprobs is not None:
            self.sequence = self._with_prompt_logprobs() or self.sequence  # the outputs read the prompt from it
        started = [child.first_token_time for child in self.children if child.first_token_time is not None]
        self.first_token_time = min(started, default=None)
        self.num_draft_tokens = sum(child.num_draft_tokens for child in self.children)
        self.num_accepted_tokens = sum(child.num_accepted_tokens for child in self.children)
        self.cached_tokens = min((c.cached_tokens for c in self.children if c.first_token_time is not None), default=0)
        if self.is_finished or not all(child.is_finished for child in self.children):
            return
        self.finished_time = max(child.finished_time or 0.0 for child in self.children)
        failed = [child for child in self.children if isinstance(child.finish_reason, FinishError)]
        self.finish_reason = (failed or self.children)[0].finish_reason  # so that the output has the error
        self.status = RequestStatus.FINISHED
