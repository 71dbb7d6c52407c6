"""Requests with log-probabilities of the prompt, and the comparison of their outputs with the expected ones."""

from m1_single_request import RequestOutput
from tests.equivalence.answers import assert_same_logprobs
from tests.support.engines import greedy

RATED = greedy(4, prompt_logprobs=2, logprobs=1)


def check_rated(output: RequestOutput, wanted: RequestOutput) -> None:
    """Tokens and all log-probabilities are the wanted ones."""
    assert output.token_ids == wanted.token_ids
    assert len(output.prompt_logprobs or ()) == len(wanted.prompt_logprobs or ())
    # Far down the list many tokens are equally likely up to rounding, and other kernels round otherwise.
    assert_same_logprobs(output.prompt_logprobs, wanted.prompt_logprobs, exact_ranks=False)
    assert_same_logprobs(output.outputs[0].logprobs, wanted.outputs[0].logprobs, exact_ranks=False)
