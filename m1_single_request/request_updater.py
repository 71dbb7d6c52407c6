"""What a step's result means for one request: commit its tokens, or end it.

Every scheduler of the course updates its requests through this one part, whatever it decides about queues and memory.
The stop checker is asked before anything is committed, and a commit happens whole or not at all. vLLM keeps the same
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
    """Changes requests on behalf of a scheduler; knows no queue."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        self.stop_checker = stop_checker
        self.tracer = tracer
        self.num_output_tokens = 0  # of all requests since the start

    def mark(self, request: Request, reason: BaseFinishReason) -> bool:
        """Note that `request` is to end with `reason` at the next update. False if it was marked already."""
        if request.to_finish is not None:
            return False
        request.to_finish = reason
        if isinstance(reason, FinishAbort):
            self.tracer.emit(Abort, rid=request.request_id, state=request.status.value)
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
            verdict = self.stop_checker.check(sequence, sampled.token_ids)
            for token_id, row in zip(sampled.token_ids[: verdict.num_accepted], sampled.logprobs, strict=False):
                sequence.add_token_id(token_id, row)
            if sampled.prompt_logprobs is not None:
                sequence.add_prompt_logprobs(sampled.prompt_logprobs)
            sequence.text_end = verdict.text_end
            sequence.num_computed_tokens += num_new_kv + verdict.num_accepted - 1
            if request.to_finish is None:  # an abort may have come meanwhile
                request.to_finish = verdict.finish_reason
        except Exception as error:
            sequence.rewind(before)
            request.to_finish = FinishError(error)
            return
        self.num_output_tokens += verdict.num_accepted
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
        self.tracer.emit(Result.of, request, verdict.num_accepted, before.reading)
        self.tracer.emit(TextHeld.of, request)

    def end(self, request: Request, reason: BaseFinishReason) -> None:
        """Give the request its end; the scheduler has taken it out of its queues."""
        request.finish_reason = reason
        request.finished_time = time.monotonic()
        request.status = RequestStatus.FINISHED
        self.tracer.emit(Finish.of, request, reason)
