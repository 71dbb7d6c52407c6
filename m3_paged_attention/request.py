"""A request whose prompt may have siblings: `n > 1` asks for several continuations of one prompt.

Each continuation is a request of its own, `rid/0`, `rid/1`, ..., with its own seed, text and end; the scheduler treats
them like any others, except that a sibling may start on the KV blocks of another. `ParentRequest` is what the caller
knows: it is never scheduled, it only reports. New in m3; vLLM: `ParentRequest` in `v1/engine/parallel_sampling.py`.
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
    """m1's request, with what a scheduler of blocks keeps about it."""

    parent_id: str | None = None
    """The request that this one is a continuation of."""
    is_sent: bool = False
    """Whether the runner knows its tokens and blocks, so that differences are enough."""
    number: int = 0
    """Its place in the order of arrival."""
    simple_stops: SimpleStops | None = None
    """Its whole stop condition, if that is no more than ids and a length."""


class ParentRequest(SingleRequest):
    """Several continuations of one prompt, reported as one. Children may be of any class with a `parent_id`."""

    def __init__(self, children: list[Any], *, request_id: str) -> None:
        first = children[0]
        super().__init__(request_id, first.prompt, first.sequence, first.seed, first.arrival_time)
        self.children = children
        for child in children:
            child.parent_id = request_id

    @property
    def sequences(self) -> dict[str, Sequence]:
        """Those of all children, by their ids."""
        return {child.sequence.seq_id: child.sequence for child in self.children}

    def hand_on_prompt_logprobs(self) -> None:
        """If the child that was to bring the prompt's log-probabilities is given up before, let another one do it."""
        asked = self.sampling_params.prompt_logprobs  # the first one's
        alive = [child for child in self.children if child.to_finish is None and not child.is_finished]
        if asked is None or self._with_prompt_logprobs() is not None:
            return
        heirs = [child for child in alive if not child.sequence.get_output_len()]
        if heirs and all(child.sampling_params.prompt_logprobs is None for child in alive):
            heirs[0].sampling_params = replace(heirs[0].sampling_params, prompt_logprobs=asked)

    def _with_prompt_logprobs(self) -> Sequence | None:
        """The sequence that has the prompt's log-probabilities."""
        return next((s for s in self.sequences.values() if s.has_prompt_logprobs), None)

    def take_stock(self) -> None:
        """Note what has happened to the children: the parent's times, and its end with that of the last child."""
        if self.sampling_params.prompt_logprobs is not None:
            self.sequence = self._with_prompt_logprobs() or self.sequence  # the one that is asked about the prompt
        started = [child.first_token_time for child in self.children if child.first_token_time is not None]
        self.first_token_time = min(started, default=None)
        self.num_draft_tokens = sum(child.num_draft_tokens for child in self.children)
        self.num_accepted_tokens = sum(child.num_accepted_tokens for child in self.children)
        self.cached_tokens = min((c.cached_tokens for c in self.children if c.first_token_time is not None), default=0)
        if self.is_finished or not all(child.is_finished for child in self.children):
            return
        self.finished_time = max(child.finished_time or 0.0 for child in self.children)
        failed = [child for child in self.children if isinstance(child.finish_reason, FinishError)]
        self.finish_reason = (failed or self.children)[0].finish_reason  # an error must reach the caller
        self.status = RequestStatus.FINISHED
