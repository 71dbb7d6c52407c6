"""Request updater: m1's commit, and a faster one for the usual case, one more token that does not end the request.

A decode step of 256 requests commits 256 tokens, and few of them end a request. The stop condition of most requests is
a set of ids and a length. `commit_simply` computes it once per request and compares each token with it. New in m3,
whose steps are the first with so many requests. vLLM and SGLang run the whole check for each token.
"""

from collections.abc import Sequence

from m1_single_request.output_events import Result, TextHeld
from m1_single_request.request_updater import RequestUpdater as SingleRequestUpdater
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.request import Request, SimpleStops


class RequestUpdater(SingleRequestUpdater):
    """m1's `RequestUpdater` with `commit_simply`."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None:
        super().__init__(stop_checker=stop_checker, tracer=tracer)
        self._is_usual = type(stop_checker).check is StopChecker.check  # a user's class may have other rules

    def commit_simply(self, requests: Sequence[Request], token_ids: Sequence[int]) -> list[int]:
        """Append one token, with one new KV, to each request that this token cannot end.

        Return the indices of the other requests, which are unchanged and need `commit`.
        """
        others = []
        for index, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            sequence, stops = request.sequence, request.simple_stops or self.simple_stops(request)
            output = sequence.output_token_ids
            if stops is None or token_id in stops.stop_ids or len(output) + 1 >= stops.num_output or request.to_finish:
                others.append(index)
                continue
            try:
                sequence.detokenizer.push(token_id)
            except Exception:  # in a user's class; `commit` ends this request with the error
                others.append(index)
                continue
            output.append(token_id)
            sequence.num_computed_tokens += 1
            self.tracer.emit(Result.of, request, 1)
            self.tracer.emit(TextHeld.of, request)
        self.num_output_tokens += len(requests) - len(others)
        return others

    def simple_stops(self, request: Request) -> SimpleStops | None:
        """Store and return the stop condition of a request; None if it is more than ids and a length."""
        params, sequence = request.sampling_params, request.sequence
        asks_more = params.stop or params.logprobs is not None or sequence.get_output_len() < params.min_tokens
        if asks_more or not self._is_usual:
            return None
        longest = min(params.max_tokens, self.stop_checker.max_model_len - sequence.get_prompt_len())
        request.simple_stops = SimpleStops(self.stop_checker.stop_ids(sequence), longest)
        return request.simple_stops
