"""A prefill engine computes one token of each request; the decode engine checks whether it ends the answer."""

from collections.abc import Sequence as SequenceOf

from m1_single_request.request import FinishLength, Sequence
from m1_single_request.stop_checker import StopChecker, StopVerdict

HANDED_ON = FinishLength("max_tokens of a prefill engine", 1)
"""End of the computation on the prefill side: the request waits until its KV has arrived."""
TAKEN_OVER = FinishLength("max_tokens of a prefill engine", 1)
"""End on the prefill side: the decode side has all KV."""


class FirstTokenOnly:
    """A stop checker after whose first token a request is handed on. SGLang sets `max_new_tokens` to 1 for that."""

    def __init__(self, stop_checker: StopChecker) -> None:
        """`stop_checker`: the engine's; it knows the stop ids, which may not be drawn before `min_tokens`."""
        self.stop_checker = stop_checker
        self.eos_token_ids, self.max_model_len = stop_checker.eos_token_ids, stop_checker.max_model_len

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """Return the stop ids that the decode engine has."""
        return self.stop_checker.stop_ids(sequence)

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        """Accept one token, and end the request on this engine."""
        sequence.detokenizer.push(new_token_ids[0])
        return StopVerdict(1, HANDED_ON)
