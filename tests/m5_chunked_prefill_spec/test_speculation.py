"""How many tokens are guessed for whom: never more than can be used, paid for or shared, and by counts alone."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec import CostTable, SpeculativeConfig
from m5_chunked_prefill_spec.speculative.speculation import (
    MEMORY,
    PAUSE,
    SpecState,
    Speculation,
    best_number,
    share_out,
)
from tests.m4_radix_cache.reqs import make_req

FREE = CostTable((1, 1000), (10.0, 10.0))
"""A step costs the same however large it is: guesses are free."""
DEAR = CostTable((1, 1000), (1.0, 1000.0))
"""Every token costs as much as a step: a guess must be right to pay, and almost always."""


class AsMany:
    """Proposes as many tokens as it may, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        self.asked.append(list(limits))
        return [[7] * limit for limit in limits]


def speculation(
    table: CostTable | None = None, *, most: int = 4, max_model_len: int = 1000, proposer: Any = None
) -> Speculation:
    """The real one, that guesses at most so many tokens."""
    return Speculation(
        proposer=proposer or AsMany(),
        config=SpeculativeConfig(method="ngram", num_speculative_tokens=most),
        max_model_len=max_model_len,
        vocab_size=100,
        cost_table=table,
    )


def guessed(number: int = 0, *, prompt: int = 5, said: int = 1, max_tokens: int = 100) -> Req:
    """A request in the middle of its answer, for which tokens may be guessed."""
    req = make_req(number, [1] * prompt, outputs=[2] * said, max_tokens=max_tokens)
    req.spec_state = SpecState()
    return req


# --- limits -----------------------------------------------------------------------------------------------------------


def test_no_more_is_guessed_than_the_configuration_says() -> None:
    assert speculation(most=3).limit(guessed(), 1) == 3


@pytest.mark.parametrize(("left", "expected"), [(9, 4), (6, 4), (5, 4), (4, 3), (2, 1), (1, 0)])
def test_the_last_token_that_may_come_needs_no_guess(left: int, expected: int) -> None:
    """One token comes without a guess: with `left` to come, at most `left - 1` guesses can be used."""
    assert speculation().limit(guessed(said=10, max_tokens=10 + left), 1) == expected
    assert speculation(max_model_len=15 + left).limit(guessed(prompt=5, said=10), 1) == expected


def test_a_request_that_asked_for_none_gets_none() -> None:
    req = guessed()
    req.spec_state = None
    assert speculation().limit(req, 1) == speculation(FREE).limit(req, 1) == 0


def test_nobody_is_asked_where_nothing_can_be_guessed() -> None:
    proposer = AsMany()
    own = speculation(proposer=proposer)
    assert own.propose([guessed()], 0) == [] == own.propose([], 5) == own.propose([guessed(max_tokens=2)], 5)
    assert proposer.asked == []
    nobody = Speculation(proposer=None, config=SpeculativeConfig(), max_model_len=99, vocab_size=9, cost_table=None)
    assert nobody.propose([guessed()], 9) == []


def test_guesses_of_nobody_are_none() -> None:
    class Silent(AsMany):
        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
            return [[] for _ in reqs]

    assert speculation(proposer=Silent()).propose([guessed(0), guessed(1)], 9) == []


def test_the_proposer_is_told_what_each_may_have() -> None:
    proposer = AsMany()
    reqs = [guessed(0), guessed(1, max_tokens=3), guessed(2)]
    reqs[2].spec_state = None
    drafts = speculation(proposer=proposer).propose(reqs, 100)
    assert proposer.asked == [[4, 1, 0]] and drafts == [[7] * 4, [7], []]


# --- sharing ----------------------------------------------------------------------------------------------------------

wishes = st.lists(st.integers(0, 8), max_size=8)


@given(wishes, st.integers(0, 40))
def test_what_is_shared_out_is_wanted_and_used_up(wanted: list[int], most: int) -> None:
    given_ = share_out(wanted, most)
    assert len(given_) == len(wanted) and sum(given_) == min(most, sum(wanted))
    assert all(0 <= got <= wish for got, wish in zip(given_, wanted, strict=True))


@given(wishes, st.integers(0, 40))
def test_nobody_gets_more_while_somebody_has_less_and_wants_more(wanted: list[int], most: int) -> None:
    """By hand: one after the other takes one more, in turns, until nothing is left or wanted."""
    by_hand, left = [0] * len(wanted), most
    while left and by_hand != wanted:
        for i, wish in enumerate(wanted):
            if left and by_hand[i] < wish:
                by_hand[i], left = by_hand[i] + 1, left - 1
    assert share_out(wanted, most) == by_hand


def test_a_step_has_room_for_so_many_guesses_and_no_more() -> None:
    reqs = [guessed(i) for i in range(3)]
    for most in range(1, 14):
        drafts = speculation().propose(reqs, most)
        assert sum(map(len, drafts)) == min(most, 12)
        assert max(map(len, drafts)) - min(map(len, drafts)) <= 1


# --- what pays --------------------------------------------------------------------------------------------------------


@given(
    rate=st.integers(0, 20).map(lambda x: x / 20),
    most=st.integers(1, 8),
    num_running=st.integers(1, 16),
    costs=st.tuples(st.integers(1, 50), st.integers(0, 400), st.integers(0, 40)),
)
def test_the_best_number_is_the_one_with_the_cheapest_token(
    rate: float, most: int, num_running: int, costs: tuple[int, int, int]
) -> None:
    """By hand: the chance of each number of right guesses, and what they bring."""
    step, more, draft = costs
    table = CostTable((1, 129), (float(step), float(step + more)), draft_ms=draft / 8)

    def cost_of_a_token(k: int) -> float:
        p = Fraction(rate).limit_denominator(20)
        chances = [p**i * (1 - p) for i in range(k)] + [p**k]
        expected = sum(chance * (1 + right) for right, chance in enumerate(chances))
        return (table.step(num_running * (1 + k)) + k * table.draft(num_running)) / float(expected)

    found = best_number(rate, most, num_running, table)
    assert 0 <= found <= most
    assert cost_of_a_token(found) <= min(cost_of_a_token(k) for k in range(most + 1)) * (1 + 1e-9)


def test_free_guesses_are_made_as_many_as_may_be_while_any_is_right() -> None:
    assert [best_number(rate, 7, 4, FREE) for rate in (0.01, 0.5, 1.0)] == [7, 7, 7]
    assert best_number(0.0, 7, 4, FREE) == 0, "a guess that is never right brings nothing"


def test_guesses_as_dear_as_steps_are_not_made() -> None:
    assert [best_number(rate, 7, 4, DEAR) for rate in (0.0, 0.5, 0.9)] == [0, 0, 0]


def test_the_more_are_right_the_more_are_made() -> None:
    table = CostTable((1, 100), (10.0, 60.0))
    numbers = [best_number(rate / 20, 8, 2, table) for rate in range(21)]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 8 and len(set(numbers)) > 3


def test_the_more_run_the_fewer_are_made() -> None:
    """A step of few tokens costs what its weights cost to read; one of many pays for every token."""
    table = CostTable((1, 16, 256), (10.0, 10.0, 160.0))
    numbers = [best_number(0.7, 8, running, table) for running in (1, 2, 4, 8, 16)]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]


# --- what was counted -------------------------------------------------------------------------------------------------


def test_guesses_behind_the_first_wrong_one_were_never_looked_at() -> None:
    state = SpecState()
    tried, right = state.tried, state.right
    state.count(5, 2)
    assert (state.tried - tried, state.right - right) == (3, 2)
    state.count(4, 4)
    assert (state.tried - tried, state.right - right) == (7, 6)
    state.count(1, 0)
    assert (state.tried - tried, state.right - right) == (8, 6)


def test_the_rate_follows_what_happens_and_forgets_what_was_long_ago() -> None:
    state = SpecState()
    assert 0.5 < state.rate < 1
    for _ in range(50):
        state.count(4, 4)
        assert state.tried <= MEMORY
    assert state.rate > 0.95
    for _ in range(40):
        state.count(4, 0)
    assert state.rate < 0.2
    for _ in range(20):
        state.count(4, 4)
    assert state.rate > 0.8


def test_totals_are_of_all_requests_and_each_has_its_own() -> None:
    own, reqs = speculation(), [guessed(0), guessed(1)]
    own.verified(reqs[0], 4, 2)
    own.verified(reqs[0], 4, 4)
    own.verified(reqs[1], 3, 0)
    assert [(req.num_draft_tokens, req.num_accepted_tokens) for req in reqs] == [(8, 6), (3, 0)]
    assert (own.num_draft_tokens, own.num_accepted_tokens, own.num_verifications) == (11, 6, 3)
    assert reqs[0].spec_state.rate > reqs[1].spec_state.rate


# --- backing off ------------------------------------------------------------------------------------------------------


def limits_of(own: Speculation, req: Req, num_tokens: int, accepted: Any) -> list[int]:
    """The limits at each of the next output tokens, one token a step; `accepted(limit)` of the guesses are right."""
    limits = []
    for _ in range(num_tokens):
        limits.append(own.limit(req, 1))
        if limits[-1]:
            own.verified(req, limits[-1], accepted(limits[-1]))
        req.output_ids.append(3)
    return limits


def test_without_a_table_nobody_backs_off() -> None:
    assert set(limits_of(speculation(), guessed(), 60, lambda limit: 0)) == {4}


def test_free_guesses_go_on_however_bad_they_are() -> None:
    assert set(limits_of(speculation(FREE), guessed(max_tokens=500), 100, lambda limit: 0)) == {4}


def test_guesses_that_do_not_pay_stop_but_for_one_now_and_then() -> None:
    limits = limits_of(speculation(DEAR), guessed(max_tokens=500), 5 * PAUSE, lambda limit: 0)
    assert limits == ([1] + [0] * (PAUSE - 1)) * 5


def test_a_request_whose_guesses_become_better_is_guessed_for_again() -> None:
    table, req = CostTable((1, 100), (10.0, 300.0)), guessed(max_tokens=2000)
    own = speculation(table, max_model_len=5000)
    limits_of(own, req, 100, lambda limit: 0)
    assert set(limits_of(own, req, 3 * PAUSE, lambda limit: 0)) == {0, 1}
    limits = limits_of(own, req, 30 * PAUSE, lambda limit: limit)
    assert 1 in limits and limits[-PAUSE:] == [4] * PAUSE


def test_the_same_counts_decide_the_same_whatever_the_clock_says() -> None:
    table = CostTable((1, 100), (10.0, 120.0))
    runs = [limits_of(speculation(table), guessed(max_tokens=500), 120, lambda limit: limit // 2) for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) > 1


def test_one_request_backs_off_and_another_one_does_not() -> None:
    own, good, bad = speculation(CostTable((1, 100), (10.0, 120.0))), guessed(0), guessed(1)
    for _ in range(12):
        own.verified(good, 4, 4)
        own.verified(bad, 4, 0)
    assert own.limit(good, 2) == 4 and own.limit(bad, 2) <= 1


def test_a_pause_does_not_outlast_what_the_last_tokens_need() -> None:
    """The limits at the end of an answer hold for guesses that pay as for others."""
    own = speculation(FREE)
    assert [own.limit(guessed(said=said, max_tokens=12), 1) for said in (8, 9, 10, 11)] == [3, 2, 1, 0]
