"""Random traffic for the schedulers of living batches: arrivals that share stems, limits, and every accident.

Hypothesis draws it, `play` lets it happen on a bed, step by step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from hypothesis import strategies as st

from m4_radix_cache.config import SchedulePolicyName
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from tests.testbed.bed import Step
from tests.testbed.radix import CACHES, RadixBed

MANY_STEPS = 1500
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


@dataclass(frozen=True)
class Traffic:
    """All that happens to a scheduler. Steps count from 0; a request is named by its place among all children."""

    limits: Limits
    arrivals: tuple[Arrival, ...]
    aborts: tuple[tuple[int, bool, int], ...] = ()
    """Step, whether while the model runs (else before the decision), request."""
    failures: tuple[tuple[int, int], ...] = ()
    """Step, request: it gets no token there if it runs."""
    crashes: tuple[int, ...] = ()
    """Steps in which the model raises."""
    squeezes: tuple[int, ...] = ()
    """Steps in which somebody is retracted whatever is free; as many as there are of the same step."""


@st.composite
def traffic(draw: st.DrawFn, *, disturbed: bool = True, largest_family: int = 3, longest_prompt: int = 16) -> Traffic:
    """Some requests and some limits; `disturbed`: with all kinds of accidents."""
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
    steps = st.integers(0, 12)
    longest = min(limits.num_tokens - 2, longest_prompt)
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.one_of(st.just(0), steps),
                stem=st.integers(0, NUM_STEMS - 1),
                stem_len=st.integers(0, longest - 1),
                own_len=st.integers(0, 4),
                max_tokens=st.integers(1, 14),
                n=st.one_of(st.just(1), st.integers(1, largest_family)),
                stop=st.booleans(),
                prompt_logprobs=st.sampled_from([None, None, None, 1]),
                priority=st.integers(-1, 1),
                extra_key=st.sampled_from([None, None, "salt"]),
            ).map(lambda one: replace(one, own_len=max(min(one.own_len, longest - one.stem_len), not one.stem_len))),
            min_size=1,
            max_size=9,
        )
    )
    plain = Traffic(limits, tuple(sorted(arrivals, key=lambda arrival: arrival.step)))
    if not disturbed:
        return plain
    victims = st.integers(0, sum(arrival.n for arrival in arrivals) - 1)
    return replace(
        plain,
        aborts=tuple(draw(st.lists(st.tuples(steps, st.booleans(), victims), max_size=6))),
        failures=tuple(draw(st.lists(st.tuples(steps, victims), max_size=3))),
        crashes=tuple(draw(st.lists(steps, max_size=2))),
        squeezes=tuple(draw(st.lists(steps, max_size=4))),
    )


def names(traffic: Traffic, prefix: str = "r") -> list[str]:
    return [f"{prefix}{number}" for number in range(len(traffic.arrivals))]


def scheduled_names(traffic: Traffic, names: list[str]) -> list[str]:
    """The names of all children, and of whoever has no siblings."""
    pairs = zip(names, traffic.arrivals, strict=True)
    return [f"{name}/{i}" if one.n > 1 else name for name, one in pairs for i in range(one.n)]


def play(traffic: Traffic, bed: RadixBed, names: list[str]) -> Iterator[Step]:
    """Let the traffic happen; yields before the first step, and after every step."""
    ids = scheduled_names(traffic, names)
    for number in range(MANY_STEPS):
        come(traffic, bed, names, number)
        if number > 12 and not bed.scheduler.requests:
            bed.drain()
            return
        bed.abort(*(ids[who] for step, late, who in traffic.aborts if step == number and not late))
        bed.pools.due = traffic.squeezes.count(number)
        late = [ids[who] for step, late, who in traffic.aborts if step == number and late]
        yield bed.step(
            between=lambda decision, late=late: bed.abort(*late),  # type: ignore[misc]
            failing=[ids[who] for step, who in traffic.failures if step == number],
            crash=number in traffic.crashes,
        )
        bed.pools.release()
    raise AssertionError(f"not done after {MANY_STEPS} steps")


def come(traffic: Traffic, bed: RadixBed, names: list[str], number: int) -> None:
    """Let those arrive who come before this step."""
    for place, one in enumerate(traffic.arrivals):
        if one.step == number:
            bed.add(
                one.prompt(place),
                one.max_tokens,
                n=one.n,
                request_id=names[place],
                seed=place,
                stop_token_ids=[98 + place] if one.stop else [],
                prompt_logprobs=one.prompt_logprobs,
                priority=one.priority,
                extra_key=one.extra_key,
                repetition_penalty=1.1 if place % 3 == 2 else 1.0,
            )


def plain_trace(bed: RadixBed, names: list[str]) -> list[Any]:
    """All events of a bed, with numbers instead of names, to be compared with another bed's."""
    assert bed.recorder is not None
    places = {rid: place for place, rid in enumerate(names)}

    def plain(name: str, value: Any) -> Any:
        if name == "why":  # a sentence
            return ""
        if isinstance(value, tuple):
            return [places.get(one, one) if isinstance(one, str) else one for one in value]
        return places.get(value, value) if isinstance(value, str) else value

    return [
        (record.step, record.event.kind, {name: plain(name, value) for name, value in vars(record.event).items()})
        for record in bed.recorder.records
    ]
