"""How many tokens are guessed for a request: a fixed number, and never more than can be used or shared."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from m5_chunked_prefill_spec import SpeculativeConfig
from m5_chunked_prefill_spec.request import Req
from m5_chunked_prefill_spec.speculative.speculation import Speculation, share_out
from tests.m4_radix_cache.reqs import make_req


class AsMany:
    """Proposes as many tokens as it may, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        self.asked.append(list(limits))
        return [[7] * limit for limit in limits]


def speculation(*, most: int = 4, max_model_len: int = 1000, proposer: Any = None) -> Speculation:
    """The real one, that guesses at most so many tokens."""
    return Speculation(
        proposer=proposer or AsMany(),
        config=SpeculativeConfig(method="ngram", num_speculative_tokens=most),
        max_model_len=max_model_len,
        vocab_size=100,
    )


def guessed(number: int = 0, *, prompt: int = 5, said: int = 1, max_tokens: int = 100) -> Req:
    """A request in the middle of its answer, for which tokens may be guessed."""
    req: Req = make_req(number, [1] * prompt, outputs=[2] * said, max_tokens=max_tokens, request_class=Req)
    return req


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "expected"), [(9, 4), (6, 4), (5, 4), (4, 3), (2, 1), (1, 0)])
def test_the_last_token_that_may_come_needs_no_guess(left: int, expected: int) -> None:
    """One token comes without a guess: with `left` to come, at most `left - 1` guesses can be used."""
    assert speculation().limit(guessed(said=10, max_tokens=10 + left)) == expected
    assert speculation(max_model_len=15 + left).limit(guessed(prompt=5, said=10)) == expected


def test_a_request_that_asked_for_none_gets_none() -> None:
    req = guessed()
    req.speculate = False
    assert speculation().limit(req) == 0


def test_nobody_is_asked_where_nothing_can_be_guessed() -> None:
    proposer = AsMany()
    own = speculation(proposer=proposer)
    assert own.propose([guessed()], 0) == [] == own.propose([], 5) == own.propose([guessed(max_tokens=2)], 5)
    assert proposer.asked == []
    nobody = Speculation(proposer=None, config=SpeculativeConfig(), max_model_len=99, vocab_size=9)
    assert nobody.propose([guessed()], 9) == []


def test_guesses_of_nobody_are_none() -> None:
    class Silent(AsMany):
        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
            return [[] for _ in reqs]

    assert speculation(proposer=Silent()).propose([guessed(0), guessed(1)], 9) == []


def test_the_proposer_is_told_what_each_may_have() -> None:
    proposer = AsMany()
    reqs = [guessed(0), guessed(1, max_tokens=3), guessed(2)]
    reqs[2].speculate = False
    drafts = speculation(proposer=proposer).propose(reqs, 100)
    assert proposer.asked == [[4, 1, 0]] and drafts == [[7] * 4, [7], []]


# --- sharing ----------------------------------------------------------------------------------------------------------

wishes = st.lists(st.integers(0, 8), max_size=8)


@given(wishes, st.integers(0, 40))
def test_nobody_gets_more_while_somebody_has_less_and_wants_more(wanted: list[int], most: int) -> None:
    """By hand: one after the other takes one more, in turns, until nothing is left or wanted."""
    by_hand, left = [0] * len(wanted), most
    while left and by_hand != wanted:
        for i, wish in enumerate(wanted):
            if left and by_hand[i] < wish:
                by_hand[i], left = by_hand[i] + 1, left - 1
    assert share_out(wanted, most) == by_hand


# --- totals -----------------------------------------------------------------------------------------------------------


def test_totals_are_of_all_requests_and_each_has_its_own() -> None:
    own, reqs = speculation(), [guessed(0), guessed(1)]
    own.verified(reqs[0], 4, 2)
    own.verified(reqs[0], 4, 4)
    own.verified(reqs[1], 3, 0)
    assert [(req.num_draft_tokens, req.num_accepted_tokens) for req in reqs] == [(8, 6), (3, 0)]
    assert own.totals == {"num_draft_tokens": 11, "num_accepted_tokens": 6, "num_verifications": 3}
