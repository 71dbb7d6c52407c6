"""Random traffic against the scheduler: whatever comes when, every decision is the one that the rules name.

Hypothesis draws arrivals, limits, aborts and failures. The test-bed judges every message of every step;
here the decisions are compared with an oracle of a few lines, and what follows from them is asserted: no request is
starved, none overtakes, each ends with exactly the right tokens, and the same arrivals give the same trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import given, settings, strategies as st

from tests.support.amounts import examples
from tests.testbed.bed import SchedulerBed, Step, make_bed
from tests.testbed.fakes import answer
from tests.testbed.outcomes import check_ends, check_names_do_not_matter
from tests.testbed.traffic import ARRIVAL_STEPS, Traffic, names, play, traffic_of

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
    n: ClassVar[int] = 1

    def arrive(self, bed: SchedulerBed, place: int, name: str) -> None:
        """Add it to a bed."""
        prompt = [33 + (place * 7 + i) % 90 for i in range(self.prompt_len)]
        stops = answer(prompt, 5)[4:] if self.stop else ()
        bed.add(prompt, self.max_tokens, request_id=name, stop_token_ids=stops)


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int


@st.composite
def traffic(draw: st.DrawFn, *, disturbed: bool = True) -> Traffic:
    """Some requests and some limits; `disturbed`: with aborts and failures."""
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 7, 16]))
    budget = max_num_seqs + draw(st.sampled_from([0, 0, 1, 3, 8, 24]))
    arrival = st.builds(
        Arrival,
        step=ARRIVAL_STEPS,
        prompt_len=st.one_of(st.just(budget), st.integers(1, budget)),
        max_tokens=st.integers(1, 12),
        stop=st.booleans(),
    )
    return traffic_of(draw, Limits(max_num_seqs, budget), arrival, most=20, disturbed=disturbed)


def bed_for(traffic: Traffic, *, trace: bool = False) -> SchedulerBed:
    return make_bed(max_model_len=MAX_MODEL_LEN, trace=trace, **vars(traffic.limits))


@dataclass(frozen=True)
class Before:
    """The scheduler before a decision; requests that are marked to end are left out."""

    running: list[str]
    waiting: list[str]
    num_running: int
    """All that occupy a place, the marked ones too."""


def decisions(traffic: Traffic, bed: SchedulerBed) -> Iterator[tuple[Before, Step]]:
    """Let the traffic happen; yields after every step what was before its decision, and what it did."""
    schedule, before = bed.schedule, list[Before]()

    def noting() -> Any:
        running, waiting = (
            [r.request_id for r in queue if not r.to_finish] for queue in (bed.scheduler.running, bed.scheduler.waiting)
        )
        before.append(Before(running, waiting, num_running=len(bed.scheduler.running)))
        return schedule()

    bed.schedule = noting  # type: ignore[method-assign]
    for step in play(traffic, bed, names(traffic)):
        yield before[-1], step


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(traffic())
def test_each_request_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    check_ends(traffic, bed_for(traffic), MAX_MODEL_LEN)


@settings(max_examples=examples(100))
@given(traffic(), st.randoms(use_true_random=False))
def test_the_same_arrivals_give_the_same_trace_whatever_the_requests_are_called(traffic: Traffic, random: Any) -> None:
    check_names_do_not_matter(traffic, lambda: bed_for(traffic, trace=True), random)


# --- the rules --------------------------------------------------------------------------------------------------------


def decision(traffic: Traffic, before: Before, left_out: list[str], lens: dict[str, int]) -> dict[str, int]:
    """What a step must schedule: requests that the last one left out, whole prompts in order, then all others."""
    counts = dict.fromkeys((rid for rid in before.running if rid in left_out), 1)
    places, room = traffic.limits.max_num_seqs - before.num_running, traffic.limits.max_num_batched_tokens - len(counts)
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
    lens = {rid: arrival.prompt_len for rid, arrival in zip(names(traffic), traffic.arrivals, strict=True)}
    left_out: list[str] = []
    for before, step in decisions(traffic, bed_for(traffic)):
        assert step.counts == decision(traffic, before, left_out, lens)
        left_out = [rid for rid in before.running if rid not in step.counts]


@settings(max_examples=examples(150))
@given(traffic(disturbed=False))
def test_no_request_is_starved(traffic: Traffic) -> None:
    """A decode misses at most one step in a row; the first in line is kept out by the budget at most two in a row."""
    missed: set[str] = set()
    kept_out: dict[str, int] = {}
    for before, step in decisions(traffic, bed_for(traffic)):
        missing = {rid for rid in before.running if rid not in step.counts}
        assert not missing & missed
        missed = missing
        first = next((rid for rid in before.waiting if rid not in step.joined), None)
        if first is not None and before.num_running + len(step.joined) < traffic.limits.max_num_seqs:
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
    for before, step in decisions(traffic, bed):
        gone |= step.output.finished_req_ids if step.output is not None else set()
        events = [record.event for record in bed.recorder.records[seen:]]
        seen = len(bed.recorder.records)
        batches: list[Any] = [event for event in events if event.kind == "batch"]
        assert len(batches) == (step.output is not None)
        if not batches:
            continue
        batch = batches[0]
        assert dict(zip(batch.rids, batch.extend_lens, strict=True)) == step.counts
        assert batch.total_tokens == sum(step.counts.values()) <= batch.budget == traffic.limits.max_num_batched_tokens
        assert list(batch.joined) == step.joined == [event.rid for event in events if event.kind == "admit"]  # type: ignore[attr-defined]
        assert set(batch.left) == gone
        gone = set()
        refused = [event for event in events if event.kind == "not_admitted"]
        still = [rid for rid in before.waiting if rid not in step.joined]
        assert [event.rid for event in refused] == still[:1]  # type: ignore[attr-defined]
        left_out = [event.rids for event in events if event.kind == "left_out"]  # type: ignore[attr-defined]
        missing = tuple(rid for rid in before.running if rid not in step.counts)
        assert left_out == ([missing] if missing else [])
