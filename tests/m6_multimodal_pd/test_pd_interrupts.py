"""Ctrl-C in the program that has a group of engines: nothing that had come is lost, and nobody waits for ever.

Engines of this process, one of which is lost on the way, so that requests are routed, cancelled and tried anew; a step
is interrupted before one of the lines that stand between engines and the user. Whoever called `step` goes on.
"""

import sys
from collections import deque
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from m6_multimodal_pd import RequestOutput
from m6_multimodal_pd.disaggregation import inbox, links, members, router, router_core
from m6_multimodal_pd.disaggregation.inbox import handed_out
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import Asked, Group, aggregated, check_alike, setting
from tests.testbed.interrupts import Interrupt, interrupted

OWN: list[ModuleType] = [inbox, links, members, router, router_core]
ASKED: Asked = {
    "a": (list(range(5, 25)), greedy(6, logprobs=1), {}),
    "b": (list(range(40, 70)), greedy(3, temperature=0.9, seed=3), {}),
    "family": ([7, 8, 9], greedy(4, n=2, temperature=1.0, seed=5), {}),
    "gone": ([9] * 12, greedy(30), {}),
}
MANY_STEPS = 200
CASES = 16
"""More take long; all of them, some 300, were tried."""
LIMITS = setting(3, 16, tokens=128, page_size=4)
LOST_AT, GONE_AT = 5, 7
"""The steps before which an engine is lost, and a request is aborted."""


def test_what_is_handed_out_stays_until_it_is_handled() -> None:
    queue = deque("abc")
    for letter in handed_out(queue):
        assert queue[0] == letter
        if letter == "b":
            break  # as if something were raised
    assert list(handed_out(queue)) == ["b", "c"] and not queue


@pytest.fixture(scope="module")
def wanted(tiny_directory: Path) -> dict[str, RequestOutput]:
    """What all of them are answered if nobody is interrupted."""
    return aggregated(tiny_directory, {rid: ask for rid, ask in ASKED.items() if rid != "gone"})


def prepare(group: Group, number: int) -> None:
    """What happens before a step."""
    if number == LOST_AT:
        group.lose("decode-0")
    if number == GONE_AT:
        group.engine.abort_request("gone")


def places(model: Path) -> list[tuple[str, int, int]]:
    """Every line that a run without interrupts reaches, with its step and its place in it: the first and last time."""
    first: dict[str, tuple[str, int, int]] = {}
    last: dict[str, tuple[str, int, int]] = {}
    with Group(model, 1, 2, **LIMITS) as group:
        group.add(ASKED)
        for step in count():
            prepare(group, step)
            if not group.engine.has_unfinished_requests():
                return [*first.values(), *last.values()]
            with interrupted(sys.maxsize, OWN) as interrupt:
                group.engine.step()
            for line, where in enumerate(interrupt.lines, start=1):
                last[where] = (where, step, line)
                first.setdefault(where, last[where])
    raise AssertionError("unreachable")


@pytest.mark.exhaustive
def test_an_interrupt_before_any_line_between_engines_and_user_loses_nothing(
    tiny_directory: Path, wanted: dict[str, RequestOutput]
) -> None:
    found = places(tiny_directory)
    assert len(found) > 250
    for where, step, line in Random(5).sample(found, min(CASES, len(found))):
        with Group(tiny_directory, 1, 2, **LIMITS) as group:
            try:
                if run_interrupted(group, step, line) == where:
                    check_end(group, wanted)
            except Exception as error:
                raise AssertionError(f"after an interrupt before {where}: {error!r}") from error


def run_interrupted(group: Group, step: int, line: int) -> str | None:
    """Run to the end, with one interrupt; returns where it was, None if inside an engine."""
    group.add(ASKED)
    interrupt = Interrupt()
    for number in range(MANY_STEPS):
        prepare(group, number)
        if number > GONE_AT and not group.engine.has_unfinished_requests():
            return interrupt.where
        outputs: dict[str, Any] = {}
        if number == step:
            with interrupted(line, OWN) as interrupt:
                outputs = group.engine.step()
            if "Engine.tick" in interrupt.inside:
                return None  # engines are interrupted only here, where they are no processes
        else:
            outputs = group.engine.step()
        group.last |= outputs
    raise AssertionError("somebody waits for ever")


def check_end(group: Group, wanted: dict[str, RequestOutput]) -> None:
    """Everybody has ended with the right tokens, and nothing is left."""
    assert group.last.keys() == ASKED.keys() and all(output.finished for output in group.last.values())
    assert group.last["gone"].finish_reason == "abort"
    check_alike({rid: group.last[rid] for rid in wanted}, wanted)
    for _ in range(20):
        group.router.listen(0)
    group.check_drained()
    group.check_flushed()
