"""Random traffic for a scheduler, drawn by hypothesis: requests that arrive, limits, and every accident.

What a request and the limits are differs between milestones; the accidents are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.testbed.bed import Step

MANY_STEPS = 1500
STEPS = st.integers(0, 12)
"""The steps in which something happens."""
ARRIVAL_STEPS = st.one_of(st.just(0), STEPS)


@dataclass(frozen=True)
class Traffic:
    """All that happens to a scheduler. Steps count from 0; a request is named by its place among all children."""

    limits: Any
    arrivals: tuple[Any, ...]
    """Requests with `step`, before which they come, `n` children, and `arrive(bed, place, name)`."""
    aborts: tuple[tuple[int, bool, int], ...] = ()
    """Step, whether while the model runs (else before the decision), request."""
    failures: tuple[tuple[int, int], ...] = ()
    """Step, request: it gets no token there if it runs."""
    crashes: tuple[int, ...] = ()
    """Steps in which the model raises."""
    squeezes: tuple[int, ...] = ()
    """Steps in which a request is preempted whatever is free; as many as there are of the same step."""


def traffic_of(draw: st.DrawFn, limits: Any, arrival: st.SearchStrategy[Any], *, most: int, disturbed: bool) -> Traffic:
    """The traffic of at `most` so many arrivals; `disturbed`: with all kinds of accidents."""
    arrivals = draw(st.lists(arrival, min_size=1, max_size=most))
    plain = Traffic(limits, tuple(sorted(arrivals, key=lambda arrival: arrival.step)))
    if not disturbed:
        return plain
    victims = st.integers(0, sum(arrival.n for arrival in arrivals) - 1)
    return replace(
        plain,
        aborts=tuple(draw(st.lists(st.tuples(STEPS, st.booleans(), victims), max_size=6))),
        failures=tuple(draw(st.lists(st.tuples(STEPS, victims), max_size=3))),
        crashes=tuple(draw(st.lists(STEPS, max_size=2))),
        squeezes=tuple(draw(st.lists(STEPS, max_size=4))),
    )


def names(traffic: Traffic, prefix: str = "r") -> list[str]:
    return [f"{prefix}{number}" for number in range(len(traffic.arrivals))]


def scheduled_names(traffic: Traffic, names: list[str]) -> list[str]:
    """The names of all children, and of each request without siblings."""
    pairs = zip(names, traffic.arrivals, strict=True)
    return [f"{name}/{i}" if one.n > 1 else name for name, one in pairs for i in range(one.n)]


def play(traffic: Traffic, bed: Any, names: list[str]) -> Iterator[Step]:
    """Let the traffic happen; yields before the first step, and after every step."""
    ids = scheduled_names(traffic, names)
    for number in range(MANY_STEPS):
        for place, arrival in enumerate(traffic.arrivals):
            if arrival.step == number:
                arrival.arrive(bed, place, names[place])
        if number > 12 and not bed.scheduler.requests:
            bed.drain()
            return
        bed.abort(*(ids[who] for step, late, who in traffic.aborts if step == number and not late))
        bed.memory.due = traffic.squeezes.count(number)
        late = [ids[who] for step, late, who in traffic.aborts if step == number and late]
        yield bed.step(
            between=lambda decision, late=late: bed.abort(*late),  # type: ignore[misc]
            failing=[ids[who] for step, who in traffic.failures if step == number],
            crash=number in traffic.crashes,
        )
        bed.memory.relax()
    raise AssertionError(f"not done after {MANY_STEPS} steps")


def plain_trace(bed: Any, names: list[str]) -> list[Any]:
    """All events of a bed, with numbers instead of names, to be compared with another bed's."""
    places = {rid: place for place, rid in enumerate(names)}

    def plain(name: str, value: Any) -> Any:
        if name == "why":  # a sentence
            return ""
        if isinstance(value, tuple):
            plain_values = [places.get(one, one) if isinstance(one, str) else one for one in value]
            return sorted(plain_values) if name == "left" else plain_values  # `left` is sorted by name
        return places.get(value, value) if isinstance(value, str) else value

    return [
        (record.step, record.event.kind, {name: plain(name, value) for name, value in vars(record.event).items()})
        for record in bed.recorder.records
    ]
