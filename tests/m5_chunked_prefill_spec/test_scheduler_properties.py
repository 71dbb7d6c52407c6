"""Random traffic against the scheduler of pieces, decodes and guesses: tiny pools, shared prompts, and every accident.

Hypothesis draws arrivals, limits, policies, schedules, sizes of pieces, guesses of every quality, aborts, failures
and forced retractions. The test-bed checks every decision and every page, and reads every slot of KV; here
it is asserted what follows from many decisions, above all that nobody waits for ever.
"""

from dataclasses import dataclass
from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from m4_radix_cache.config import SchedulePolicyName
from m5_chunked_prefill_spec import batch_composer
from tests.support.amounts import examples
from tests.testbed.outcomes import check_ends, check_names_do_not_matter, check_progress
from tests.testbed.pieces import Guesses, PiecesBed, make_pieces_bed
from tests.testbed.radix_traffic import Traffic, traffic

MAX_MODEL_LEN = 64
LONGEST_PROMPT = 44


@dataclass(frozen=True)
class Cuts:
    """How steps are filled."""

    schedule: str
    max_num_batched_tokens: int
    chunked_prefill_size: int | None
    most_guesses: int
    right: float
    is_chunked: bool = True

    def bed(self, traffic: Traffic, **settings: Any) -> PiecesBed:
        """For this traffic; what would be refused as a configuration, or at intake, is left out."""
        least = max(traffic.limits.max_num_seqs, 0 if self.is_chunked else longest_prompt(traffic))
        limits = vars(traffic.limits) | {
            "max_num_batched_tokens": max(self.max_num_batched_tokens, least),
            "schedule": self.schedule,
            "enable_chunked_prefill": self.is_chunked,
            "chunked_prefill_size": self.chunked_prefill_size if self.is_chunked else None,
        }
        guesses = Guesses(self.most_guesses, right=self.right) if self.most_guesses else None
        return make_pieces_bed(max_model_len=MAX_MODEL_LEN, guesses=guesses, **limits | settings)


CUTS = st.builds(
    Cuts,
    schedule=st.sampled_from(["decode_first", "decode_first", "prefill_first"]),
    max_num_batched_tokens=st.sampled_from([8, 9, 11, 16, 40]),
    chunked_prefill_size=st.sampled_from([None, None, 4, 5, 7]),
    most_guesses=st.sampled_from([0, 1, 3, 6]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    is_chunked=st.sampled_from([True, True, False]),
)


def longest_prompt(traffic: Traffic) -> int:
    return max(one.stem_len + one.own_len for one in traffic.arrivals)


def any_traffic(**settings: Any) -> Any:
    return traffic(longest_prompt=LONGEST_PROMPT, **settings)


@settings(max_examples=examples(60))
@given(any_traffic(), CUTS)
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic, cuts: Cuts) -> None:
    check_ends(traffic, cuts.bed(traffic, tensors=True), MAX_MODEL_LEN, check_rated)


def check_rated(req: Any) -> None:
    """All of its prompt has log-probabilities, each in its place, if they were asked for."""
    rows = req.sequence.prompt_logprobs
    if req.sampling_params.prompt_logprobs is None:
        assert rows is None
        return
    assert rows[0] is None and len(rows) == len(req.origin_input_ids)
    rated = [(token_id, -entry.logprob) for row in rows[1:] for token_id, entry in row.items()]
    assert rated == [(token_id, place) for place, token_id in enumerate(req.origin_input_ids[1:])]


@settings(max_examples=examples(8))
@given(any_traffic(), CUTS, st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(
    traffic: Traffic, cuts: Cuts, random: Any
) -> None:
    check_names_do_not_matter(traffic, lambda: cuts.bed(traffic, trace=True), random)


@settings(max_examples=examples(20))
@given(any_traffic(disturbed=False), CUTS)
def test_there_is_always_somebody_who_goes_on(traffic: Traffic, cuts: Cuts) -> None:
    check_progress(traffic, cuts.bed(traffic))


# --- nobody waits for ever --------------------------------------------------------------------------------------------

PATIENCE = 3
"""In so many steps newcomers may go before somebody in these tests, so that they need not be long."""


@dataclass(frozen=True)
class Crowd:
    """Newcomers without end, and what is known of them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill_size: int | None
    page_size: int
    most_guesses: int
    longest_prompt: int
    most_tokens: int
    is_chunked: bool = True

    @property
    def least_piece(self) -> int:
        """Of a prompt that is in pieces so many tokens run in each step: at most all other places decode, one token
        each, and guesses take half of what is left. Without chunks there is one piece."""
        if not self.is_chunked:
            return self.longest_prompt
        left = self.max_num_batched_tokens - (self.max_num_seqs - 1)
        return min(-(-left // 2) if self.most_guesses else left, self.chunked_prefill_size or left)

    @property
    def steps_in_pieces(self) -> int:
        """From the first piece, which may be smaller because it takes what others leave, to the last one."""
        return 1 + -(-(self.longest_prompt - 1) // self.least_piece) if self.is_chunked else 1

    @property
    def steps_of_a_life(self) -> int:
        """From the step in which a request is let in to the one in which it ends."""
        return self.steps_in_pieces + self.most_tokens - 1

    def longest_wait(self, num_before: int) -> int:
        """Steps before a request is let in, of which so many older ones had not ended when it came.

        If nobody is let in for the length of a life, all who ran have ended, so that the next in order finds all
        places, all memory and a whole step. Between two steps that let somebody in there are not more. In such a step
        either newcomers go before the request, which counts against their patience, or none but older ones do. Besides,
        it may have been held back for the prefix of an older one: once while that waits, once while that is in pieces.
        """
        return (PATIENCE + 2 * num_before + 1) * (self.steps_of_a_life + 1)

    def bed(self, policy: str) -> PiecesBed:
        """With memory for as many as may run, so that nobody loses its place."""
        pages = -(-(self.longest_prompt + self.most_tokens) // self.page_size)
        return make_pieces_bed(
            num_tokens=(self.max_num_seqs + 1) * pages * self.page_size,
            page_size=self.page_size,
            schedule_policy=policy,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_batched_tokens, 0 if self.is_chunked else self.longest_prompt),
            enable_chunked_prefill=self.is_chunked,
            chunked_prefill_size=self.chunked_prefill_size if self.is_chunked else None,
            guesses=Guesses(self.most_guesses) if self.most_guesses else None,
        )


CROWDS = st.integers(1, 3).flatmap(
    lambda places: st.builds(
        Crowd,
        max_num_seqs=st.just(places),
        max_num_batched_tokens=st.integers(places, 12),
        chunked_prefill_size=st.sampled_from([None, None, 1, 3, 8]),
        page_size=st.sampled_from([1, 4]),
        most_guesses=st.sampled_from([0, 3]),
        longest_prompt=st.integers(4, 24),
        most_tokens=st.integers(1, 5),
        is_chunked=st.sampled_from([True, True, False]),
    )
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy", get_args(SchedulePolicyName))
def test_nobody_waits_or_stands_in_pieces_longer_than_the_bound(policy: str) -> None:
    seen = {"waits": 0, "overtaken": 0}

    @settings(max_examples=examples(8))
    @given(CROWDS, st.randoms(use_true_random=False))
    def holds(crowd: Crowd, random: Any) -> None:
        bed = crowd.bed(policy)
        bed.add(crowd.longest_prompt, max_tokens=crowd.most_tokens, priority=1)
        first = Patience(crowd, bed)
        for _ in range(3):  # those whom every policy likes least
            first.comes(crowd.longest_prompt, 1)
        while not all(rid in bed.ended for rid in first.waits):
            while len(bed.waiting()) < 6:
                length = random.randint(1, crowd.longest_prompt)
                bed.add(length, crowd.most_tokens, priority=1, same_as=random.choice(["r0", None]))
            first.step()
        assert not bed.scheduler.num_retractions
        seen["waits"] += sum(first.waits.values())
        seen["overtaken"] += first.overtaken
        bed.abort(*bed.requests)
        bed.drain()

    with mock.patch.object(batch_composer, "MAX_PASSED_OVER", PATIENCE):
        holds()
    assert seen["waits"] > 20 and (seen["overtaken"] > 5 or policy == "fcfs"), seen


class Patience:
    """Counts the steps in which some requests wait, and in which anybody stands in pieces."""

    def __init__(self, crowd: Crowd, bed: PiecesBed) -> None:
        self.crowd, self.bed = crowd, bed
        self.waits: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.in_pieces: dict[str, int] = {}
        self.overtaken = 0

    def comes(self, length: int, max_tokens: int) -> None:
        num_before = len(self.bed.scheduler.requests)
        rid = self.bed.add(length, max_tokens)
        self.waits[rid], self.limits[rid] = 0, self.crowd.longest_wait(num_before)

    def step(self) -> None:
        before = set(self.bed.waiting())
        decision = self.bed.step().output
        for rid in before & self.waits.keys() - set(decision.rids):
            self.waits[rid] += 1
            number = self.bed.reqs[rid].number
            self.overtaken += any(self.bed.reqs[one].number > number for one in decision.prompts if one in before)
            assert self.waits[rid] <= self.limits[rid], f"{rid} waits for ever"
        for rid in decision.prompts:
            self.in_pieces[rid] = self.in_pieces.get(rid, 0) + 1
            assert self.in_pieces[rid] <= self.crowd.steps_in_pieces, f"{rid} is in pieces for ever"
        if decision.chunked is None:
            assert self.bed.chunked() is None
        else:
            assert decision.prompts[decision.chunked] >= min(self.crowd.least_piece, 1)
