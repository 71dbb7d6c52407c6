"""Random traffic against the scheduler of a living batch: tiny pools, shared prompts, and every accident.

Hypothesis draws arrivals, limits, policies, aborts, failures and forced retractions. The test-bed checks
every decision and every page, and reads every slot of KV; here the decisions are compared with an oracle of a few
lines, and what follows from many of them is asserted.
"""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings, strategies as st

from tests.support.amounts import examples
from tests.testbed.outcomes import check_ends, check_names_do_not_matter, check_progress
from tests.testbed.radix import RadixBed, make_radix_bed
from tests.testbed.radix_traffic import Limits, Traffic, names, play, traffic

MAX_MODEL_LEN = 40


def bed_for(traffic: Traffic, **settings: Any) -> RadixBed:
    return make_radix_bed(max_model_len=MAX_MODEL_LEN, **vars(traffic.limits), **settings)


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(traffic())
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    check_ends(traffic, bed_for(traffic, tensors=True), MAX_MODEL_LEN)


@settings(max_examples=examples(15))
@given(traffic(), st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(traffic: Traffic, random: Any) -> None:
    check_names_do_not_matter(traffic, lambda: bed_for(traffic, trace=True), random)


@settings(max_examples=examples(25))
@given(traffic(disturbed=False))
def test_there_is_always_somebody_who_goes_on(traffic: Traffic) -> None:
    check_progress(traffic, bed_for(traffic))


# --- the rules --------------------------------------------------------------------------------------------------------


class Oracle:
    """What the next step must decide, from lengths alone: fcfs, nothing shared, no siblings."""

    def __init__(self, bed: RadixBed, limits: Limits) -> None:
        self.limits = limits
        self.lens = {rid: req.seqlen for rid, req in bed.reqs.items()}
        self.said = {rid: len(bed.said(rid)) for rid in bed.requests}
        self.most = {rid: req.max_new_tokens for rid, req in bed.reqs.items()}
        self.order = {rid: number for number, rid in enumerate(bed.requests)}
        self.running = bed.running()
        self.waiting = sorted(bed.waiting(), key=lambda rid: (not bed.reqs[rid].is_retracted, self.order[rid]))
        self.ratio = bed.scheduler.new_token_ratio.value
        size = limits.num_tokens // limits.page_size * limits.page_size
        self.free = size - sum(self.pages(self.lens[rid] - 1) for rid in self.running)

    def pages(self, num_tokens: int) -> int:
        """Tokens in whole pages."""
        return -(-num_tokens // self.limits.page_size) * self.limits.page_size

    def takes(self, rid: str) -> int:
        """What the next token of a running request takes."""
        return self.pages(self.lens[rid]) - self.pages(self.lens[rid] - 1)

    def to_come(self, rid: str) -> int:
        return max(self.most[rid] - self.said[rid], 0)

    def decide(self) -> tuple[list[str], list[str], dict[str, int]]:
        """Who is retracted, who is given up, and the tokens of all others."""
        joined, never = self.admit()
        if joined:
            return [], never, joined
        running, retracted = list(self.running), []
        while sum(map(self.takes, running)) > self.free and len(running) > 1:
            victim = min(running, key=lambda rid: (self.said[rid], self.said[rid] - self.lens[rid], -self.order[rid]))
            running.remove(victim)
            retracted.append(victim)
            self.free += self.pages(self.lens[victim] - 1)
        if sum(map(self.takes, running)) > self.free:
            return retracted, [*never, *running], {}
        return retracted, never, dict.fromkeys(running, 1)

    def admit(self) -> tuple[dict[str, int], list[str]]:
        joined: dict[str, int] = {}
        never: list[str] = []
        expected = int(sum(map(self.to_come, self.running)) * self.ratio)
        input_left = self.limits.max_num_batched_tokens
        for rid in self.waiting:
            if len(self.running) + len(joined) == self.limits.max_num_seqs:
                break
            kept = max(expected, self.limits.page_size * (len(self.running) + len(joined)))
            is_alone = not self.running and not joined
            lacks = self.lens[rid] + self.to_come(rid) >= self.free - kept
            if is_alone and not self.to_come(rid):  # it may fill the memory
                lacks = self.pages(self.lens[rid]) > self.free
            if lacks and not is_alone:
                break
            if lacks:
                never.append(rid)
                continue
            if joined and self.pages(self.lens[rid]) >= input_left:
                break
            joined[rid] = self.lens[rid]
            self.free -= self.pages(self.lens[rid])
            input_left -= self.pages(self.lens[rid])
            expected += self.most[rid]
            kept = max(expected, self.limits.page_size * (len(self.running) + len(joined)))
            if input_left <= 0 or self.free <= kept:
                break
        return joined, never


@settings(max_examples=examples(60))
@given(traffic(disturbed=False, largest_family=1))
def test_every_decision_is_the_one_that_the_rules_name(traffic: Traffic) -> None:
    limits = replace(traffic.limits, prefix_cache="chunk", eviction_policy="lru", schedule_policy="fcfs")
    traffic = replace(traffic, limits=limits)
    bed = bed_for(traffic)
    schedule = bed.schedule

    def judged() -> Any:
        oracle = Oracle(bed, limits)
        if bed.scheduler.batch_is_full:
            oracle.waiting = []  # the last attempt failed, and nobody has left since
        before = bed.retracted()
        retracted, given_up, counts = oracle.decide()
        batch = schedule()
        assert ({} if batch is None else batch.get_model_worker_batch().num_scheduled_tokens) == counts
        assert sorted(set(bed.retracted()) - set(before)) == sorted(retracted)
        assert sorted(rid for rid, req in bed.reqs.items() if req.to_finish and not req.is_finished) == sorted(given_up)
        return batch

    bed.schedule = judged  # type: ignore[method-assign]
    for _ in play(traffic, bed, names(traffic)):
        pass
