"""Who runs now: one request at a time, in order of arrival.

Every scheduler of the course has the same two verbs. `schedule()` decides what goes through the model in the coming
step; `update_from_output()` takes what came out and decides who goes on. Here the decision is small: the oldest request
runs alone, its whole prompt first (prefill), then one token a step (decode). m2 lets many requests share a step.
vLLM: `v1/core/sched/scheduler.py`; SGLang: `managers/scheduler.py`.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from m1_single_request.errors import DuplicateRequestError
from m1_single_request.events import Abort, Admit, Batch, Finish, RequestAdded, Result
from m1_single_request.request import (
    BaseFinishReason,
    FinishAbort,
    FinishError,
    FinishLength,
    FinishMatchedStr,
    FinishMatchedToken,
    Request,
    RequestStatus,
)
from m1_single_request.sampler import LogprobRow
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


@dataclass(frozen=True)
class SchedulerOutput:
    """What goes through the model in one step: the decision, frozen. The runner needs nothing else."""

    request_id: str
    token_ids: tuple[int, ...]
    """The new tokens: the whole prompt, or the newest output token."""
    start_position: int
    """Position of the first new token = number of tokens whose KV exists already."""
    wants_prompt_logits: bool = False
    """The runner returns logits for every new token, not only for the last."""

    @property
    def is_prefill(self) -> bool:
        return self.start_position == 0


@dataclass(frozen=True)
class SampledTokens:
    """What the sampler chose for one request in one step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobRow | None, ...]
    prompt_logprobs: tuple[LogprobRow, ...] | None = None
    """For the prompt's tokens after the first; with the prefill, where asked for."""


class Scheduler:
    """The only one that changes requests. Nothing is released between `schedule` and `update_from_output`."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.stop_checker = stop_checker
        self.tracer = tracer
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # none or one

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the checks of intake."""
        if request.request_id in self.requests:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use: it has not finished yet")
        if self.tracer:
            self.tracer.emit(
                RequestAdded(
                    rid=request.request_id,
                    len=request.sequence.get_prompt_len(),
                    max_tokens=request.sampling_params.max_tokens,
                    greedy=request.sampling_params.is_greedy,
                    seed=request.seed,
                    num_waiting=len(self.waiting),
                )
            )
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs, aborted ones included until their end was reported."""
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput | None:
        """Decide what goes through the model now; None if there is nothing to compute."""
        if not self.running:
            self._admit()
        if not self.running or self.running[0].to_finish is not None:
            return None
        request = self.running[0]
        data = request.sequence.data
        start = data.num_computed_tokens
        new = tuple(data.prompt_token_ids if start == 0 else data.output_token_ids[-1:])
        if self.tracer:
            self.tracer.emit(
                Batch(
                    mode="prefill" if start == 0 else "decode",
                    rids=(request.request_id,),
                    extend_lens=(len(new),),
                    prefix_lens=(start,),
                    seq_lens=(start + len(new),),
                )
            )
        wants_prompt_logits = start == 0 and request.sampling_params.prompt_logprobs is not None
        return SchedulerOutput(request.request_id, new, start, wants_prompt_logits)

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        """Commit a step: append tokens, end what is to end. Returns the requests that changed, oldest first.

        `sampled` holds the new tokens by request id; it is empty if the step failed or ran nothing. A request that was
        marked to finish (abort, error) ends now and its tokens of this step are dropped.
        """
        changed = [request for request in self.requests.values() if request.to_finish or request.request_id in sampled]
        for request in changed:
            if request.to_finish is None and scheduler_output is not None:
                try:
                    self._commit(request, scheduler_output, sampled[request.request_id])
                except Exception as error:  # a tokenizer or a part of somebody's own: only this request fails with it
                    request.to_finish = FinishError(error)
            if request.to_finish is not None:
                self._finish(request, request.to_finish)
        return changed

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Returns the ids that were marked."""
        marked = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.to_finish is not None:
                continue
            request.to_finish = reason
            marked.append(request_id)
            if self.tracer and isinstance(reason, FinishAbort):
                self.tracer.emit(Abort(rid=request_id, state=request.status.value))
        return marked

    def check_invariants(self) -> None:
        """Raise AssertionError if the queues contradict each other; tests call this after every step."""
        queued = [*self.running, *self.waiting]
        assert len(self.running) <= 1
        assert {r.request_id: r for r in queued} == self.requests and len(queued) == len(self.requests)
        for request in queued:
            data = request.sequence.data
            state = RequestStatus.RUNNING if request in self.running else RequestStatus.WAITING
            assert request.status is state
            done = request.sequence.get_len() - 1 if data.output_token_ids else 0
            assert data.num_computed_tokens == done, "a decoding request has KV for all tokens but the newest"

    def _admit(self) -> None:
        """Let the oldest waiting request run. One that is marked to finish stays: the update will end it."""
        request = next((r for r in self.waiting if r.to_finish is None), None)
        if request is None:
            return
        self.running.append(request)  # first, so that an interrupt never leaves it in no queue
        request.set_status(RequestStatus.RUNNING)
        self.waiting.remove(request)
        if self.tracer:
            self.tracer.emit(
                Admit(
                    rid=request.request_id,
                    prefix=0,
                    extend=request.sequence.get_prompt_len(),
                    num_waiting=len(self.waiting),
                )
            )

    def _commit(self, request: Request, scheduler_output: SchedulerOutput, sampled: SampledTokens) -> None:
        """Append the tokens that the stop checker accepts, and mark the request if they end it."""
        sequence = request.sequence
        before = sequence.mark()
        try:
            verdict = self.stop_checker.check(sequence, sampled.token_ids)
            for token_id, row in zip(sampled.token_ids[: verdict.num_accepted], sampled.logprobs, strict=False):
                sequence.add_token_id(token_id, row)
            if sampled.prompt_logprobs is not None:
                sequence.set_prompt_logprobs(list(sampled.prompt_logprobs))
            sequence.text_end = verdict.text_end
            sequence.data.num_computed_tokens += len(scheduler_output.token_ids)
        except BaseException:  # a part that failed, or Ctrl-C: the step counts whole or not at all
            sequence.rewind(before)
            raise
        if request.to_finish is None:  # an abort may have come meanwhile
            request.to_finish = verdict.finish_reason
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        if self.tracer:
            self.tracer.emit(
                Result(
                    rid=request.request_id,
                    tokens=sampled.token_ids[: verdict.num_accepted],
                    out_len=sequence.get_output_len(),
                    max_tokens=request.sampling_params.max_tokens,
                    text=sequence.detokenizer.text,
                )
            )

    def _finish(self, request: Request, reason: BaseFinishReason) -> None:
        """Take a request out of all queues. The step releases what the runner holds for it."""
        request.finish_reason = reason
        request.finished_time = time.monotonic()
        request.set_status(RequestStatus.FINISHED)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        del self.requests[request.request_id]  # last: as long as it is here, an interrupted update is made again
        if self.tracer:
            self.tracer.emit(
                Finish(
                    rid=request.request_id,
                    reason=reason.reason,
                    matched=reason.matched,
                    why=describe(reason, request),
                    out_len=request.sequence.get_output_len(),
                )
            )


def describe(reason: BaseFinishReason, request: Request) -> str:
    """A finish reason in words."""
    if isinstance(reason, FinishMatchedToken):
        kind = "the end-of-sequence token" if reason.is_eos else "the stop token"
        return f"{kind} {reason.token_id} ({request.sequence.detokenizer.token_text(reason.token_id)!r}) came"
    if isinstance(reason, FinishMatchedStr):
        return f"the stop string {reason.text!r} appeared"
    if isinstance(reason, FinishLength):
        return f"{reason.limit} = {reason.value} is reached"
    if isinstance(reason, FinishError):
        return f"{type(reason.error).__name__}: {reason.error}"
    return "the caller gave it up"
