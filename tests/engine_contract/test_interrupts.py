"""Ctrl-C in the middle of a step: it is as if the step had not been, and whoever called `step` calls it again.

That a milestone stands it before any line of its own is tested with the milestone; here are the moments that all have,
and places chosen at random.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import m1_single_request
from m1_single_request import RequestOutput
from m1_single_request.request import Request
from tests.engine_contract.crowd import (
    NUM_TOKENS,
    PROMPTS,
    SEATS,
    Answers,
    MakeEngine,
    answers_of,
    check_the_rest,
    note,
    run,
    submit,
)
from tests.engine_contract.variants import MOMENTS, FailingRunner, Moment, Variant
from tests.support.engines import greedy, unfinished

pytestmark = pytest.mark.sample(3)

CHECKOUT = Path(m1_single_request.__file__).parents[1]
MILESTONES = tuple(str(directory) for directory in CHECKOUT.glob("m[1-6]_*"))
CASES = 30


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """What everybody gets if nothing happens."""
    return answers_of(make_m1)


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize(("rid", "position"), [("a", 0), ("b", 6), ("d", 0), ("e", 5)])
def test_an_interrupted_step_can_be_repeated(
    variant: Variant, make_engine: MakeEngine, expected: Answers, rid: str, position: int, at: Moment
) -> None:
    runner = FailingRunner(variant, KeyboardInterrupt(), rid=rid, position=position, at=at)
    engine = make_engine(runner.parts, seats=SEATS)
    submit(engine)
    interrupts, last = 0, {}
    for _ in unfinished(engine):
        try:
            note(last, engine.step())
        except KeyboardInterrupt:
            interrupts += 1
        else:
            variant.check_step(engine)
    assert interrupts == 1
    check_the_rest(variant, engine, last, expected, {})


def test_an_interrupt_as_an_end_is_reported_costs_nobody_anything(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    """b has ended and its memory is free to take, but what stands in it may not be released yet."""

    class InterruptedProcessor(variant.part("output_processor")):  # type: ignore[misc]
        left = 1

        def make_output(self, request: Request) -> RequestOutput:
            if request.is_finished and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return super().make_output(request)  # type: ignore[no-any-return]

    engine = make_engine({"output_processor": InterruptedProcessor}, seats=SEATS)
    submit(engine)
    with pytest.raises(KeyboardInterrupt):
        run(variant, engine)
    check_the_rest(variant, engine, run(variant, engine), expected, {})


class Interrupts:
    """Ctrl-C at one of the places where Python looks for signals: as a function begins, or as a call of C returns."""

    def __init__(self, place: tuple[Any, ...] | None = None, nth: int = 1) -> None:
        self.place, self.nth = place, nth
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.came = False

    @contextmanager
    def within(self) -> Iterator[None]:
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.came or event not in ("call", "c_return") or not code.co_filename.startswith(MILESTONES):
            return
        place = code.co_filename, code.co_qualname, frame.f_lineno, event
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.nth:
            self.came = True
            raise KeyboardInterrupt


def serve_through(variant: Variant, engine: Any, interrupts: Interrupts) -> dict[str, Any]:
    """Serve the five requests, abort one, and go on after the interrupt as if nothing had been."""
    submit(engine)
    last: dict[str, Any] = {}
    for number, _ in enumerate(unfinished(engine)):
        if number == 3:
            engine.abort_request("d")
        try:
            with interrupts.within():
                outputs = engine.step()
        except KeyboardInterrupt:
            continue
        note(last, outputs)
        engine.engine_core.scheduler.check_invariants()
    engine.step()
    variant.check_drained(engine)
    return last


@pytest.mark.sample(2)
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    setting: dict[str, Any] = {"seats": SEATS, "budget": 6}
    uninterrupted = Interrupts()
    serve_through(variant, make_engine(**setting), uninterrupted)
    rng = Random(3)
    places = [place for place in uninterrupted.seen if "listcomp" not in place[1] and "genexpr" not in place[1]]
    assert len(places) > 100
    for place in rng.sample(places, CASES):
        interrupts = Interrupts(place, rng.randint(1, uninterrupted.seen[place]))
        engine = make_engine(**setting)
        try:
            last = serve_through(variant, engine, interrupts)
            assert interrupts.came
            assert last.keys() == PROMPTS.keys() and all(output.finished for output in last.values())
            for rid, output in last.items():
                assert output.error is None and output.token_ids == expected[rid][: len(output.token_ids)], rid
                assert output.finish_reason != "length" or output.token_ids == expected[rid], rid
            assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS["a"])).token_ids == expected["a"]
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {place}, {interrupts.nth}: {error!r}") from error
