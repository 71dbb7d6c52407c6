"""Random traffic against the scheduler: whatever comes when, every decision is the one that the rules name.

Hypothesis draws arrivals, limits, aborts and failures. The test-bed judges every message of every step;
here the decisions are compared with an oracle of a few lines, and what follows from them is asserted: no request is
starved, none overtakes, each ends with exactly the right tokens, and the same arrivals give the same trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings, strategies as st

from m1_single_request import SamplingParams
from m2_continuous_batching.request_queue import FCFSRequestQueue
from tests.support.amounts import examples
from tests.testbed.bed import SchedulerBed, Step, make_bed
from tests.testbed.fakes import answer

MANY_STEPS = 500
MAX_MODEL_LEN = 48

# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it comes."""

    step: int
    prompt_len: int
    max_tokens: int
    stop: bool = False
    """Whether its fifth token is a stop token."""


@dataclass(frozen=True)
class Traffic:
    """All that happens to a scheduler. Steps count from 0; a request is named by its place in `arrivals`."""

    max_num_seqs: int
    budget: int
    arrivals: tuple[Arrival, ...]
    aborts: tuple[tuple[int, bool, int], ...] = ()
    """Step, whether while the model runs (else before the decision), request."""
    failures: tuple[tuple[int, int], ...] = ()
    """Step, request: it gets no token there if it runs."""
    crashes: tuple[int, ...] = ()
    """Steps in which the model raises."""


LIMITS = st.sampled_from([1, 2, 3, 7, 16])


@st.composite
def traffic(draw: st.DrawFn, *, disturbed: bool = True) -> Traffic:
    """Some requests and some limits; `disturbed`: with aborts and failures."""
    max_num_seqs = draw(LIMITS)
    budget = max_num_seqs + draw(st.sampled_from([0, 0, 1, 3, 8, 24]))
    steps = st.integers(0, 12)
    arrivals = draw(
        st.lists(
            st.builds(
                Arrival,
                step=st.one_of(st.just(0), steps),
                prompt_len=st.one_of(st.just(budget), st.integers(1, budget)),
                max_tokens=st.integers(1, 12),
                stop=st.booleans(),
            ),
            min_size=1,
            max_size=20,
        )
    )
    plain = Traffic(max_num_seqs, budget, tuple(sorted(arrivals, key=lambda arrival: arrival.step)))
    if not disturbed:
        return plain
    victims = st.integers(0, len(arrivals) - 1)
    return replace(
        plain,
        aborts=tuple(draw(st.lists(st.tuples(steps, st.booleans(), victims), max_size=8))),
        failures=tuple(draw(st.lists(st.tuples(steps, victims), max_size=4))),
        crashes=tuple(draw(st.lists(steps, max_size=2))),
    )


@dataclass(frozen=True)
class Before:
    """The scheduler before a decision; requests that are marked to end are left out."""

    running: list[str]
    waiting: list[str]
    num_running: int
    """All that occupy a place, the marked ones too."""


def names(traffic: Traffic, *, prefix: str = "r") -> list[str]:
    return [f"{prefix}{number}" for number in range(len(traffic.arrivals))]


def play(traffic: Traffic, bed: SchedulerBed, ids: list[str]) -> Iterator[tuple[Before, Step]]:
    """Let the traffic happen; yields after every whole step what was before it and what it did."""
    for number in range(MANY_STEPS):
        come(traffic, bed, ids, number)
        if number > 12 and not bed.scheduler.requests:
            bed.drain()
            return
        bed.abort(*(ids[who] for step, late, who in traffic.aborts if step == number and not late))
        running, waiting = (
            [r.request_id for r in queue if not r.to_finish] for queue in (bed.scheduler.running, bed.scheduler.waiting)
        )
        before = Before(running, waiting, num_running=len(bed.scheduler.running))
        late = [ids[who] for step, late, who in traffic.aborts if step == number and late]
        yield (
            before,
            bed.step(
                between=lambda output, late=late: bed.abort(*late),  # type: ignore[misc]
                failing=[ids[who] for step, who in traffic.failures if step == number],
                crash=number in traffic.crashes,
            ),
        )
    raise AssertionError(f"not done after {MANY_STEPS} steps")


def come(traffic: Traffic, bed: SchedulerBed, ids: list[str], number: int) -> None:
    """Let those arrive that come before this step."""
    for place, arrival in enumerate(traffic.arrivals):
        if arrival.step == number:
            prompt = [33 + (place * 7 + i) % 90 for i in range(arrival.prompt_len)]
            stops = answer(prompt, 5)[4:] if arrival.stop else ()
            bed.add(prompt, arrival.max_tokens, request_id=ids[place], stop_token_ids=stops)


def bed_for(traffic: Traffic, *, trace: bool = False) -> SchedulerBed:
    return make_bed(
        max_num_seqs=traffic.max_num_seqs,
        max_num_batched_tokens=traffic.budget,
        max_model_len=MAX_MODEL_LEN,
        trace=trace,
    )


def expected(params: SamplingParams, prompt: list[int]) -> tuple[int, ...]:
    """The whole output of a request that nothing disturbs."""
    return answer(prompt, min(params.max_tokens, MAX_MODEL_LEN - len(prompt)), params.stop_token_ids)


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(traffic())
def test_each_request_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    ids = names(traffic)
    bed = bed_for(traffic)
    for _ in play(traffic, bed, ids):
        pass
    assert bed.ended.keys() == set(ids)
    aborted = {ids[who] for _, _, who in traffic.aborts}
    for rid, reason in bed.ended.items():
        whole = expected(bed.requests[rid].sampling_params, bed.requests[rid].prompt_token_ids)
        if reason in ("length", "stop"):
            assert bed.said(rid) == whole
        else:
            assert bed.said(rid) == whole[: len(bed.said(rid))]
            assert reason == "error" or rid in aborted


@settings(max_examples=examples(80))
@given(traffic())
def test_admission_is_in_order_of_arrival(traffic: Traffic) -> None:
    bed = bed_for(traffic)
    ids = names(traffic)
    joined: dict[str, None] = {}
    for _, step in play(traffic, bed, ids):
        joined |= dict.fromkeys(step.joined)
    assert list(joined) == [rid for rid in ids if rid in joined]
    never = set(ids) - joined.keys()
    assert {bed.ended[rid] for rid in never} <= {"abort"}, "only an aborted request never ran"


@settings(max_examples=examples(100))
@given(traffic(), st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(traffic: Traffic, random: Any) -> None:
    def trace(ids: list[str]) -> list[Any]:
        bed = bed_for(traffic, trace=True)
        for _ in play(traffic, bed, ids):
            pass
        assert bed.recorder is not None
        places = {rid: place for place, rid in enumerate(ids)}

        def plain(name: str, value: Any) -> Any:
            if name == "left":  # sorted by name
                return sorted(places[rid] for rid in value)
            if isinstance(value, tuple):
                return [places.get(one, one) if isinstance(one, str) else one for one in value]
            return places.get(value, value) if isinstance(value, str) else value

        return [
            (record.step, record.event.kind, {name: plain(name, value) for name, value in vars(record.event).items()})
            for record in bed.recorder.records
        ]

    first = trace(names(traffic))
    assert trace(names(traffic)) == first
    others = names(traffic, prefix="request/")
    random.shuffle(others)
    assert trace(others) == first


# --- the rules --------------------------------------------------------------------------------------------------------


def decision(traffic: Traffic, before: Before, left_out: list[str], lens: dict[str, int]) -> dict[str, int]:
    """What a step must schedule: requests that the last one left out, whole prompts in order, then all others."""
    counts = dict.fromkeys((rid for rid in before.running if rid in left_out), 1)
    places, room = traffic.max_num_seqs - before.num_running, traffic.budget - len(counts)
    for rid in before.waiting:
        if not places or lens[rid] > room:
            break
        counts[rid] = lens[rid]
        places, room = places - 1, room - lens[rid]
    others = [rid for rid in before.running if rid not in counts]
    return counts | dict.fromkeys(others[:room], 1)


@settings(max_examples=examples(200))
@given(traffic())
def test_every_decision_is_the_one_that_the_rules_name(traffic: Traffic) -> None:
    bed = bed_for(traffic)
    ids = names(traffic)
    lens = {rid: arrival.prompt_len for rid, arrival in zip(ids, traffic.arrivals, strict=True)}
    left_out: list[str] = []
    for before, step in play(traffic, bed, ids):
        assert step.counts == decision(traffic, before, left_out, lens)
        left_out = [rid for rid in before.running if rid not in step.counts]


@settings(max_examples=examples(150))
@given(traffic(disturbed=False))
def test_no_request_is_starved(traffic: Traffic) -> None:
    """A decode misses at most one step in a row; the first in line is kept out by the budget at most two in a row."""
    bed = bed_for(traffic)
    missed: set[str] = set()
    kept_out: dict[str, int] = {}
    for before, step in play(traffic, bed, names(traffic)):
        missing = {rid for rid in before.running if rid not in step.counts}
        assert not missing & missed
        missed = missing
        first = next((rid for rid in before.waiting if rid not in step.joined), None)
        if first is not None and before.num_running + len(step.joined) < traffic.max_num_seqs:
            kept_out[first] = kept_out.get(first, 0) + 1
            assert kept_out[first] <= 2
        assert bool(step.counts) == bool(before.running or before.waiting), "there is always a request that can run"


@settings(max_examples=examples(100))
@given(traffic(disturbed=False))
def test_the_trace_holds_every_decision(traffic: Traffic) -> None:
    bed = bed_for(traffic, trace=True)
    assert bed.recorder is not None
    seen = 0
    gone: set[str] = set()  # since the last batch: a step that runs nothing has none
    for before, step in play(traffic, bed, names(traffic)):
        gone |= step.output.finished_req_ids if step.output is not None else set()
        events = [record.event for record in bed.recorder.records[seen:]]
        seen = len(bed.recorder.records)
        batches: list[Any] = [event for event in events if event.kind == "batch"]
        assert len(batches) == (step.output is not None)
        if not batches:
            continue
        batch = batches[0]
        assert dict(zip(batch.rids, batch.extend_lens, strict=True)) == step.counts
        assert batch.total_tokens == sum(step.counts.values()) <= batch.budget == traffic.budget
        assert list(batch.joined) == step.joined == [event.rid for event in events if event.kind == "admit"]  # type: ignore[attr-defined]
        assert set(batch.left) == gone
        gone = set()
        refused = [event for event in events if event.kind == "not_admitted"]
        still = [rid for rid in before.waiting if rid not in step.joined]
        assert [event.rid for event in refused] == still[:1]  # type: ignore[attr-defined]
        left_out = [event.rids for event in events if event.kind == "left_out"]  # type: ignore[attr-defined]
        missing = tuple(rid for rid in before.running if rid not in step.counts)
        assert left_out == ([missing] if missing else [])


# --- a rule broken on purpose is seen ---------------------------------------------------------------------------------


def test_a_queue_that_lets_newcomers_overtake_is_noticed() -> None:
    class Stack(FCFSRequestQueue):
        def add_request(self, request: Any) -> None:
            self.appendleft(request)

    bed = bed_for(Traffic(1, 8, ()))
    bed.scheduler.waiting = Stack()
    bed.add(3), bed.add(4)
    try:
        bed.step()
    except AssertionError as error:
        assert "r1 overtakes r0" in str(error)
    else:
        raise AssertionError("it was not noticed")
