"""What a step's result means for one request: commit its tokens, or end it.

Every scheduler of the course updates its requests through this one part, whatever it decides about queues and memory.
The stop checker is asked before anything is committed, and a commit happens whole or not at all. vLLM keeps the same
rules in `Scheduler.update_from_output` and `check_stop`; SGLang in `Req` and its output processor mixin.
"""

import time
from collections.abc import Sequence

from m1_single_request.events import Abort, Finish, RequestAdded, Result
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
from m1_single_request.sampling_step import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


class RequestUpdater:
    """Changes requests on behalf of a scheduler; knows no queue."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.stop_checker = stop_checker
        self.tracer = tracer
        self._is_usual = type(stop_checker).check is StopChecker.check  # somebody's own may have other rules

    def trace_arrival(self, request: Request, *, num_waiting: int) -> None:
        """Tell the trace that a request joins the queue behind `num_waiting` others."""
        if self.tracer:
            self.tracer.emit(
                RequestAdded(
                    rid=request.request_id,
                    len=request.sequence.get_prompt_len(),
                    max_tokens=request.sampling_params.max_tokens,
                    greedy=request.sampling_params.is_greedy,
                    seed=request.seed,
                    num_waiting=num_waiting,
                )
            )

    def mark(self, request: Request, reason: BaseFinishReason) -> bool:
        """Note that `request` is to end with `reason` at the next update. False if it was marked already."""
        if request.to_finish is not None:
            return False
        request.to_finish = reason
        if self.tracer and isinstance(reason, FinishAbort):
            self.tracer.emit(Abort(rid=request.request_id, state=request.status.value))
        return True

    def commit(self, request: Request, sampled: SampledTokens, *, num_new_kv: int) -> None:
        """Append the tokens that the stop checker accepts, and mark the request if they end it.

        `num_new_kv`: how many of the tokens that it had got their KV in this step. Of several accepted tokens all but
        the last one have theirs, too. Whatever a part raises here (a tokenizer of somebody's own, say) marks this
        request alone to end with that error.
        """
        sequence = request.sequence
        before = sequence.mark()
        try:
            shown = len(sequence.detokenizer.text) if self.tracer else 0
            verdict = self.stop_checker.check(sequence, sampled.token_ids)
            for token_id, row in zip(sampled.token_ids[: verdict.num_accepted], sampled.logprobs, strict=False):
                sequence.add_token_id(token_id, row)
            if sampled.prompt_logprobs is not None:
                sequence.add_prompt_logprobs(sampled.prompt_logprobs)
            sequence.text_end = verdict.text_end
            sequence.num_computed_tokens += num_new_kv + verdict.num_accepted - 1
            new_text = sequence.detokenizer.text[shown:] if self.tracer else ""
            if request.to_finish is None:  # an abort may have come meanwhile
                request.to_finish = verdict.finish_reason
        except BaseException as error:  # a part that failed, or Ctrl-C: the step counts whole or not at all
            sequence.rewind(before)
            if not isinstance(error, Exception):
                raise
            request.to_finish = FinishError(error)
            return
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        if sequence.simple_stops is None and self._is_usual and not self.tracer:
            sequence.simple_stops = self.stop_checker.simple_stops(sequence)
        if self.tracer:
            self.tracer.emit(
                Result(
                    rid=request.request_id,
                    tokens=sampled.token_ids[: verdict.num_accepted],
                    out_len=sequence.get_output_len(),
                    max_tokens=request.sampling_params.max_tokens,
                    new_text=new_text,
                )
            )

    def commit_simply(self, requests: Sequence[Request], token_ids: Sequence[int], *, num_new_kv: int = 1) -> list[int]:
        """Give each request one token, with which `num_new_kv` KV came, where that is all there is to do.

        Returns the places of the others, which are unchanged: those that end or may end with this token, or whose text
        or log-probabilities are asked for. For these there is `commit`. While the trace is read, that is everybody.
        """
        others = []
        for index, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            sequence = request.sequence
            stops, output = sequence.simple_stops, sequence.output_token_ids
            if stops is None or token_id in stops.stop_ids or len(output) + 1 >= stops.num_output or request.to_finish:
                others.append(index)
            else:
                sequence.num_computed_tokens += num_new_kv
                output.append(token_id)  # last: an interrupt before it leaves one token too many computed, none missing
        return others

    def commit_run_simply(self, request: Request, token_ids: Sequence[int], *, num_new_kv: int = 1) -> bool:
        """`commit_simply` for one request and several tokens (from m5 on); False, and no change, if that is not all."""
        sequence = request.sequence
        stops, output = sequence.simple_stops, sequence.output_token_ids
        if stops is None or len(output) + len(token_ids) >= stops.num_output or request.to_finish:
            return False
        if not stops.stop_ids.isdisjoint(token_ids):
            return False
        sequence.num_computed_tokens += num_new_kv + len(token_ids) - 1
        output.extend(token_ids)  # last, as there
        return True

    def end(self, request: Request, reason: BaseFinishReason) -> None:
        """Give the request its end; the scheduler takes it out of its queues."""
        request.finish_reason = reason
        request.finished_time = time.monotonic()
        request.status = RequestStatus.FINISHED

    def trace_end(self, request: Request) -> None:
        """Tell the trace why the request ended, once it is in no queue any more."""
        if self.tracer and request.finish_reason is not None:
            self.tracer.emit(
                Finish(
                    rid=request.request_id,
                    reason=request.finish_reason.reason,
                    matched=request.finish_reason.matched,
                    why=describe(request.finish_reason, request),
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
