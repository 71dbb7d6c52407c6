"""Random traffic against the scheduler of blocks: tiny pools, families, both kinds of preemption, and every accident.

Hypothesis draws arrivals, limits, aborts, failures and forced preemptions. The test-bed judges every
message and reads every slot of KV; here the decisions are compared with an oracle of a few lines, and what follows from
many of them is asserted.
"""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings, strategies as st

from tests.support.amounts import examples
from tests.testbed.fakes import answer
from tests.testbed.outcomes import check_ends, check_names_do_not_matter, check_progress
from tests.testbed.paged import PagedBed, Squeezed, make_paged_bed
from tests.testbed.traffic import ARRIVAL_STEPS, Traffic, names, play, traffic_of

MAX_MODEL_LEN = 40

# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it comes."""

    step: int
    prompt_len: int
    max_tokens: int
    n: int = 1
    stop: bool = False
    """Whether its fifth token is a stop token."""
    prompt_logprobs: int | None = None

    def arrive(self, bed: PagedBed, place: int, name: str) -> None:
        """Add it to a bed."""
        prompt = [33 + (place * 7 + i) % 90 for i in range(self.prompt_len)]
        bed.add(
            prompt,
            self.max_tokens,
            n=self.n,
            request_id=name,
            seed=place,
            stop_token_ids=answer(prompt, 5, seed=place)[4:] if self.stop else (),
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(frozen=True)
class Limits:
    block_size: int
    num_blocks: int
    num_host_blocks: int
    swap: bool
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def longest_prompt(self) -> int:
        return min(self.max_num_batched_tokens, self.num_blocks * self.block_size, MAX_MODEL_LEN - 1)


@st.composite
def traffic(draw: st.DrawFn, *, disturbed: bool = True, largest_family: int = 4) -> Traffic:
    """Some requests and some limits; `disturbed`: with all kinds of accidents."""
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 8]))
    limits = Limits(
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        num_blocks=draw(st.sampled_from([1, 2, 3, 5, 8, 13, 40])),
        num_host_blocks=draw(st.sampled_from([0, 2, 5, 40])),
        swap=draw(st.booleans()),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 4, 12, 40])),
    )
    lens = st.integers(1, min(limits.longest_prompt, 16))
    arrival = st.builds(
        Arrival,
        step=ARRIVAL_STEPS,
        prompt_len=lens,
        max_tokens=st.integers(1, 14),
        n=st.one_of(st.just(1), st.integers(1, largest_family)),
        stop=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    return traffic_of(draw, limits, arrival, most=8, disturbed=disturbed)


def bed_for(traffic: Traffic, **settings: Any) -> PagedBed:
    return make_paged_bed(max_model_len=MAX_MODEL_LEN, kv_manager_class=Squeezed, **vars(traffic.limits), **settings)


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(traffic())
def test_every_request_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    check_ends(traffic, bed_for(traffic, tensors=True), MAX_MODEL_LEN)


@settings(max_examples=examples(25))
@given(traffic(), st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(traffic: Traffic, random: Any) -> None:
    check_names_do_not_matter(traffic, lambda: bed_for(traffic, trace=True), random)


# --- the rules --------------------------------------------------------------------------------------------------------


class Oracle:
    """What the next step must decide, from lengths alone: requests without siblings, preemption by recompute."""

    def __init__(self, bed: PagedBed, limits: Limits, left_out: list[str]) -> None:
        self.limits, self.left_out = limits, left_out
        self.lens = {rid: r.sequence.get_len() for rid, r in bed.requests.items()}
        self.said = {rid: len(bed.said(rid)) for rid in bed.requests}
        self.order = {rid: number for number, rid in enumerate(bed.requests)}
        self.running, self.waiting, self.again = bed.running(), bed.waiting(), bed.preempted()
        self.free = limits.num_blocks - sum(self.blocks(self.lens[rid] - 1) for rid in self.running)

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def takes(self, rid: str) -> int:
        """Blocks that the next token of a running request takes."""
        return self.blocks(self.lens[rid]) - self.blocks(self.lens[rid] - 1)

    def decide(self) -> tuple[list[str], list[str], dict[str, int]]:
        """Who is preempted, who is given up, and the tokens of all others."""
        preempted: list[str] = []
        running = list(self.running)
        while sum(map(self.takes, running)) > self.free:
            if len(running) == 1:
                return preempted, running, {}
            victim = min(running, key=lambda rid: (self.said[rid], self.said[rid] - self.lens[rid], -self.order[rid]))
            running.remove(victim)
            preempted.append(victim)
            self.free += self.blocks(self.lens[victim] - 1)
        budget = self.limits.max_num_batched_tokens
        counts: dict[str, int] = {}
        if not preempted:
            for rid in running:
                if rid in self.left_out and self.waiting:
                    counts[rid] = 1
                    self.free -= self.takes(rid)
            self.admit(counts, budget)
        for rid in running:
            if rid not in counts and sum(counts.values()) < budget:
                counts[rid] = 1
        return preempted, [], counts

    def admit(self, counts: dict[str, int], budget: int) -> None:
        num_running = len(self.running)
        for rid in self.waiting:
            kept = num_running + 1 if num_running else 0
            over = sum(counts.values()) + self.lens[rid] > budget and (counts or rid not in self.again)
            if num_running == self.limits.max_num_seqs or over or self.blocks(self.lens[rid]) + kept > self.free:
                return
            counts[rid] = self.lens[rid]
            self.free -= self.blocks(self.lens[rid])
            num_running += 1


@settings(max_examples=examples(100))
@given(traffic(disturbed=False, largest_family=1))
def test_every_decision_is_the_one_that_the_rules_name(traffic: Traffic) -> None:
    traffic = replace(traffic, limits=replace(traffic.limits, swap=False))
    bed = bed_for(traffic)
    schedule = bed.schedule
    left_out: list[str] = []

    def judged() -> Any:
        nonlocal left_out
        oracle = Oracle(bed, traffic.limits, left_out)
        preempted, given_up, counts = oracle.decide()
        output = schedule()
        assert (output.num_scheduled_tokens if output is not None else {}) == counts
        assert sorted(set(bed.preempted()) - set(oracle.again)) == sorted(preempted)
        marked = [rid for rid in oracle.running if bed.requests[rid].to_finish is not None]
        assert marked == given_up
        left_out = [rid for rid in bed.running() if rid not in counts and rid not in given_up]
        return output

    bed.schedule = judged  # type: ignore[method-assign]
    for _ in play(traffic, bed, names(traffic)):
        pass


@settings(max_examples=examples(40))
@given(traffic(disturbed=False))
def test_in_every_step_a_request_goes_on_or_ends(traffic: Traffic) -> None:
    check_progress(traffic, bed_for(traffic))
