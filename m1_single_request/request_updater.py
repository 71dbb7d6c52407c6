"""Request updater: commit the tokens of a step to a request, or end it.

Every scheduler of the course updates its requests through this one part, whatever it decides about queues and memory.
The stop checker runs before anything is committed, and a commit is made whole or not at all. vLLM keeps the same
rules in `Scheduler.update_from_output` and `check_stop`; SGLang in `Req` and its output processor mixin.
"""

import time

from m1_single_request.events import Abort
from m1_single_request.output_events import Finish, Result, TextHeld
from m1_single_request.request import BaseFinishReason, FinishAbort, FinishError, Request, RequestStatus
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer


class RequestUpdater:
    """Changes the state of requests; the queues are the scheduler's."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.stop_checker = stop_checker
        self.tracer = tracer
        self.num_output_tokens = 0  # of all requests since the start

    def mark(self, request: Request, reason: BaseFinishReason) -> bool:
        """Mark `request` to end with `reason` at the next update. Return False if it was marked already."""
        if request.to_finish is not None:
            return False
        request.to_finish = reason
        if isinstance(reason, FinishAbort):
            self.tracer.emit(Abort, rid=request.request_id, state=request.status.value)
        return True

    def commit(self, request: Request, sampled: SampledTokens, *, num_new_kv: int) -> None:
        """Append the tokens that the stop checker accepts, and mark the request if they end it.

        `num_new_kv`: number of the request's earlier tokens whose KV this step computed, 1 in a decode step. If several
        tokens are accepted (m5), their KV exists, too, except that of the last one. An exception, of a user's tokenizer
        for example, marks only this request to end with that error.
        """
        sequence = request.sequence
        before = sequence.detokenizer.mark()
        try:
            verdict = self.stop_checker.check(sequence, sampled.token_ids)
            rows = sampled.logprobs[: verdict.num_accepted]
            logprobs = [None if row is None else sequence.named(row) for row in rows]
            if sampled.prompt_logprobs is not None:
                sequence.add_prompt_logprobs(sampled.prompt_logprobs)
        except Exception as error:
            sequence.detokenizer.rewind(before)
            request.to_finish = FinishError(error)
            return
        for token_id, of_token in zip(sampled.token_ids, logprobs, strict=False):
            sequence.add_token_id(token_id, of_token)
        sequence.text_end = verdict.text_end
        sequence.num_computed_tokens += num_new_kv + verdict.num_accepted - 1
        if request.to_finish is None:  # an abort may have come meanwhile
            request.to_finish = verdict.finish_reason
        self.num_output_tokens += verdict.num_accepted
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        self.tracer.emit(Result.of, request, verdict.num_accepted, before[1])
        self.tracer.emit(TextHeld.of, request)

    def end(self, request: Request, reason: BaseFinishReason) -> None:
        """End a request that the scheduler has removed from its queues."""
        request.finish_reason = reason
        request.finished_time = time.monotonic()
        request.status = RequestStatus.FINISHED
        self.tracer.emit(Finish.of, request, reason)
