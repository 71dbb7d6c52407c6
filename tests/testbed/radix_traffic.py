"""Random traffic for the schedulers of living batches: arrivals whose prompts share stems, and their limits."""

from dataclasses import dataclass, replace
from typing import get_args

from hypothesis import strategies as st

from m4_radix_cache.config import SchedulePolicyName
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from tests.testbed.radix import CACHES, RadixBed
from tests.testbed.traffic import (
    ARRIVAL_STEPS,
    Traffic as Traffic,
    names as names,
    plain_trace as plain_trace,
    play as play,
    scheduled_names as scheduled_names,
    traffic_of,
)

NUM_STEMS = 3
"""Prompts begin with one of so many texts."""


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it comes."""

    step: int
    stem: int
    stem_len: int
    """How many tokens of its stem it begins with."""
    own_len: int
    """And how many of its own follow."""
    max_tokens: int
    n: int = 1
    stop: bool = False
    """Whether its fifth token is a stop token."""
    prompt_logprobs: int | None = None
    priority: int = 0
    extra_key: str | None = None

    def prompt(self, place: int) -> list[int]:
        stem = [33 + (self.stem * 29 + i) % 90 for i in range(self.stem_len)]
        return stem + [33 + (place * 7 + i + 50) % 90 for i in range(self.own_len)]

    def arrive(self, bed: RadixBed, place: int, name: str) -> None:
        """Add it to a bed."""
        bed.add(
            self.prompt(place),
            self.max_tokens,
            n=self.n,
            request_id=name,
            seed=place,
            stop_token_ids=[98 + place] if self.stop else [],
            prompt_logprobs=self.prompt_logprobs,
            priority=self.priority,
            extra_key=self.extra_key,
            repetition_penalty=1.1 if place % 3 == 2 else 1.0,
        )


@dataclass(frozen=True)
class Limits:
    num_tokens: int
    page_size: int
    prefix_cache: str
    eviction_policy: str
    schedule_policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    conservativeness: float
    priority_preemption: bool = False
    preemption_threshold: int = 10


@st.composite
def traffic(
    draw: st.DrawFn,
    *,
    disturbed: bool = True,
    largest_family: int = 3,
    longest_prompt: int = 16,
    preempting: bool = False,
) -> Traffic:
    """Some requests and some limits; `disturbed`: with all kinds of accidents. `preempting`: urgent requests take the
    places of others; then nobody is retracted without need."""
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 8]))
    prefix_cache = draw(st.sampled_from(list(CACHES)))
    policies = tuple(STRATEGIES) if prefix_cache == "radix" else ("lru",)
    limits = Limits(
        num_tokens=4 * draw(st.sampled_from([2, 3, 4, 6, 9, 14, 40])),
        page_size=draw(st.sampled_from([1, 2, 4])),
        prefix_cache=prefix_cache,
        eviction_policy=draw(st.sampled_from(policies)),
        schedule_policy=draw(st.sampled_from(get_args(SchedulePolicyName))),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.sampled_from([16, 20, 40])),
        conservativeness=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
    )
    if preempting:
        threshold = draw(st.sampled_from([0, 0, 1]))
        limits = replace(limits, schedule_policy="priority", priority_preemption=True, preemption_threshold=threshold)
    longest = min(limits.num_tokens - 2, longest_prompt)
    arrival = st.builds(
        Arrival,
        step=ARRIVAL_STEPS,
        stem=st.integers(0, NUM_STEMS - 1),
        stem_len=st.integers(0, longest - 1),
        own_len=st.integers(0, 4),
        max_tokens=st.integers(1, 14),
        n=st.one_of(st.just(1), st.integers(1, largest_family)),
        stop=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.integers(-2, 2) if preempting else st.integers(-1, 1),
        extra_key=st.sampled_from([None, None, "salt"]),
    ).map(lambda one: replace(one, own_len=max(min(one.own_len, longest - one.stem_len), not one.stem_len)))
    found = traffic_of(draw, limits, arrival, most=9, disturbed=disturbed)
    return replace(found, squeezes=()) if preempting else found
