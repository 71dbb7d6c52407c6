"""The graders of the exercises: a wrong answer is refused with a hint that names the mistake, another right one passes.

The answers are in `wrong_*.py`, one file a notebook. That the solutions pass is in `test_lessons.py`.
"""

from typing import Any

import pytest

from notebooks.checks import check
from tests.notebooks import (
    wrong_m1,
    wrong_m2,
    wrong_m3,
    wrong_m4,
    wrong_m4_tiers,
    wrong_m5,
    wrong_m6,
    wrong_m6_overlap,
    wrong_m6_pd,
    wrong_m7,
    wrong_m8,
)
from tests.notebooks.exercises import open_exercise

MODULES = (
    wrong_m1,
    wrong_m2,
    wrong_m3,
    wrong_m4,
    wrong_m4_tiers,
    wrong_m5,
    wrong_m6,
    wrong_m6_pd,
    wrong_m6_overlap,
    wrong_m7,
    wrong_m8,
)
IN_AN_ENGINE = {
    *("m1.output_processor", "m2.shortest_first", "m2.starved_decode"),
    *("m3.newest_first", "m3.freed_block", "m4.strategy", "m4.freed_while_mapped", "m4.whole_hit"),
    *("m5.sampled_piece", "m5.starved"),
}
"""Exercises whose graders run engines, for each answer."""
WRONG: list[Any] = [
    pytest.param(exercise, answer, hints, number, id=f"{exercise}-{number}")
    for module in MODULES
    for exercise, answers in module.WRONG.items()
    for number, (answer, *hints) in enumerate(answers)
]
QUICK = [case for case in WRONG if case.values[0] not in IN_AN_ENGINE]
SLOW = [case for case in WRONG if case.values[0] in IN_AN_ENGINE]
RIGHT = [case for module in MODULES for case in getattr(module, "RIGHT", [])]


def assert_refused(exercise: str, answer: Any, hints: list[str]) -> None:
    verdict = check(exercise, answer)
    assert not verdict, f"{exercise} accepts it: {verdict}"
    for hint in hints:
        assert hint in verdict.message, f"{hint!r} is not in {verdict.message!r}"


@pytest.mark.parametrize(("exercise", "answer", "hints", "number"), QUICK)
def test_a_wrong_answer_is_refused_with_its_mistake(exercise: str, answer: Any, hints: list[str], number: int) -> None:
    assert_refused(exercise, answer, hints)


@pytest.mark.sample(of=lambda exercise, **_: {exercise})
@pytest.mark.parametrize(("exercise", "answer", "hints", "number"), SLOW)
def test_an_answer_wrong_in_an_engine_is_refused_too(exercise: str, answer: Any, hints: list[str], number: int) -> None:
    assert_refused(exercise, answer, hints)


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=[exercise for exercise, _ in RIGHT])
def test_another_right_answer_passes(exercise: str, answer: Any) -> None:
    assert check(exercise, answer)


def test_an_exercise_where_nothing_is_written_says_so() -> None:
    assert repr(check("m1.kv_bytes", open_exercise)) == "m1.kv_bytes: not yet. Nothing is written here yet."


def test_an_answer_that_raises_is_told_what_was_raised() -> None:
    message = check("m1.held_back", lambda text, stops: ""[1]).message
    assert "raised IndexError: string index out of range (in `<lambda>`: `message = check(" in message


def test_an_unknown_exercise_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"m1\.nothing.*m1\.kv_bytes"):
        check("m1.nothing", None)
