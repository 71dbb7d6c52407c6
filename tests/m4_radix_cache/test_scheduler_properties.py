"""Random traffic against the scheduler of a living batch: tiny pools, shared prompts, and every accident.

Hypothesis draws arrivals, limits, policies, aborts, failures, interrupts and forced retractions. The test-bed checks
every decision and every page, and reads every slot of KV; here the decisions are compared with an oracle of a few
lines, and what follows from many of them is asserted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from hypothesis import given, settings, strategies as st

from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import SchedulePolicyName
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from tests.testbed.bed import Step
from tests.testbed.radix import CACHES, RadixBed, make_radix_bed
from tests.testbed.radix_runner import answer_of

MANY_STEPS = 1500
MAX_MODEL_LEN = 40
NUM_STEMS = 3
"""Prompts begin with one of so many texts."""

# --- traffic ----------------------------------------------------------------------------------------------------------


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
    interrupts: tuple[tuple[int, bool], ...] = ()
    """Steps before which a decision is thrown away, and whether the model ran it."""
    squeezes: tuple[int, ...] = ()
    """Steps in which somebody is retracted whatever is free; as many as there are of the same step."""


@st.composite
def traffic(draw: st.DrawFn, *, disturbed: bool = True, largest_family: int = 3) -> Traffic:
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
    longest = min(limits.num_tokens - 2, 16)
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
        interrupts=tuple(draw(st.lists(st.tuples(steps, st.booleans()), max_size=4))),
        squeezes=tuple(draw(st.lists(steps, max_size=4))),
    )


def bed_for(traffic: Traffic, **settings: Any) -> RadixBed:
    return make_radix_bed(max_model_len=MAX_MODEL_LEN, **vars(traffic.limits), **settings)


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
        if number > 12 and not bed.scheduler.has_unfinished_requests():
            bed.drain()
            return
        bed.abort(*(ids[who] for step, late, who in traffic.aborts if step == number and not late))
        for step, executed in traffic.interrupts:
            if step == number:
                bed.interrupt(executed=executed)
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


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(traffic())
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    bed = bed_for(traffic)
    for _ in play(traffic, bed, names(traffic)):
        pass
    ids = scheduled_names(traffic, names(traffic))
    assert bed.ended.keys() == set(ids)
    assert sorted(bed.reported_ends) == sorted(names(traffic)), "callers hear of each end once"
    aborted = {ids[who] for _, _, who in traffic.aborts}
    for rid, reason in bed.ended.items():
        req = bed.reqs[rid]
        whole = answer_of(req, min(req.sampling_params.max_tokens, MAX_MODEL_LEN - len(req.origin_input_ids)))
        assert bed.said(rid) == whole[: len(bed.said(rid))]
        if reason == "abort":
            assert rid in aborted
        elif reason == "error":
            is_outgrown = req.seqlen > traffic.limits.num_tokens
            assert not isinstance(bed.error_of(rid), KVCapacityError) or is_outgrown, "it could have run alone"
        else:
            assert bed.said(rid) == whole
            asked = req.sampling_params.prompt_logprobs is not None
            assert (req.sequence.data.prompt_logprobs is not None) == asked
    bed.flush()


@settings(max_examples=15)
@given(traffic(), st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(traffic: Traffic, random: Any) -> None:
    def trace(names: list[str]) -> list[Any]:
        bed = bed_for(traffic, trace=True)
        for _ in play(traffic, bed, names):
            pass
        assert bed.recorder is not None
        places = {rid: place for place, rid in enumerate([*scheduled_names(traffic, names), *names])}

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

    first = trace(names(traffic))
    assert trace(names(traffic)) == first
    others = names(traffic, prefix="request-")
    random.shuffle(others)
    assert trace(others) == first


@settings(max_examples=25)
@given(traffic(disturbed=False))
def test_there_is_always_somebody_who_goes_on(traffic: Traffic) -> None:
    bed = bed_for(traffic)
    for step in play(traffic, bed, names(traffic)):
        assert step.counts or "error" in step.ended.values() or not bed.scheduler.has_unfinished_requests()


@settings(max_examples=12)
@given(traffic())
def test_answers_are_the_same_in_another_cache_under_another_policy(traffic: Traffic) -> None:
    """Aborts and failures come at other tokens there, so only the wholly undisturbed are compared to the end."""
    said = []
    for prefix_cache, schedule_policy in (("chunk", "fcfs"), ("radix", "lpm"), ("hash", "dfs-weight")):
        limits = replace(
            traffic.limits, prefix_cache=prefix_cache, schedule_policy=schedule_policy, eviction_policy="lru"
        )
        plain = Traffic(limits, traffic.arrivals, interrupts=traffic.interrupts, squeezes=traffic.squeezes)
        bed = bed_for(plain, debug=True)
        for _ in play(plain, bed, names(plain)):
            pass
        said.append({rid: bed.said(rid) for rid in bed.requests})
    assert said[0] == said[1] == said[2]


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


@settings(max_examples=60)
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


@settings(max_examples=25)
@given(traffic(disturbed=False, largest_family=1))
def test_under_fcfs_those_who_never_ran_come_in_by_arrival(traffic: Traffic) -> None:
    bed = bed_for(replace(traffic, limits=replace(traffic.limits, schedule_policy="fcfs")))
    joined: dict[str, None] = {}
    for step in play(traffic, bed, names(traffic)):
        if step.output.mode == "extend":
            came = sorted((rid for rid in step.output.rids if rid not in joined), key=names(traffic).index)
            joined |= dict.fromkeys(came)
    assert list(joined) == [rid for rid in names(traffic) if rid in joined]
    assert set(joined) == set(names(traffic)) - {rid for rid, reason in bed.ended.items() if not bed.said(rid)}
