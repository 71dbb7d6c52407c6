"""A prefill engine says one token of each request, and leaves it to others to ask whether that ends the answer."""

from collections.abc import Sequence as SequenceOf

from m1_single_request.request import FinishLength, Sequence
from m1_single_request.stop_checker import StopChecker, StopVerdict

HANDED_ON = FinishLength("first_token", 1)
"""Why a request is computed no further on the prefill side."""
TAKEN_OVER = FinishLength("first_token", 1)
"""Why it is over there: the other side has everything."""


class FirstTokenOnly:
    """A stop checker after whose first token a request is handed on. SGLang sets `max_new_tokens` to 1 for that."""

    def __init__(self, stop_checker: StopChecker) -> None:
        """`stop_checker`: the one that knows the stop ids, which may not be drawn before `min_tokens`."""
        self.stop_checker = stop_checker
        self.eos_token_ids, self.max_model_len = stop_checker.eos_token_ids, stop_checker.max_model_len

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """As the engine that answers will have them."""
        return self.stop_checker.stop_ids(sequence)

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        """One token, and that is all."""
        sequence.detokenizer.push(new_token_ids[0])
        return StopVerdict(1, HANDED_ON)
