"""The hints of the exercises: two for each, none of which is the solution, shown by `check(..., hint=1)`."""

import re
from typing import Any

import pytest

from notebooks.checks import GRADERS, check
from notebooks.hints import HINTS
from tests.notebooks.exercises import open_exercise
from tests.notebooks.lessons import sections, solution_of

KEYWORDS = ("break", "continue", "else:", "pass", "return", "return None", "try:")
"""Lines that are no part of an idea."""


def pieces_of(code: str) -> set[str]:
    """The lines of a solution, and what they assign or return, without comments."""
    lines = {re.sub(r"\s+# .*", "", line).strip() for line in code.splitlines()}
    values = {found[1] for line in lines if (found := re.search(r"(?:return |(?<=\s)= )(.{8,})$", line))}
    return {piece for piece in lines | values if piece and piece not in KEYWORDS}


def test_every_exercise_has_two_hints_in_the_order_of_the_exercises() -> None:
    assert set(HINTS) == set(GRADERS)
    assert list(HINTS) == list(sections())


@pytest.mark.parametrize("exercise", HINTS)
def test_two_different_hints_of_one_or_two_sentences_say_no_line_of_the_solution(exercise: str) -> None:
    first, second = HINTS[exercise]
    assert first != second
    for hint in (first, second):
        assert 1 <= len(re.findall(r"[.?](?=\s|$)", hint)) <= 2 and hint.endswith((".", "?")), hint
        assert not [piece for piece in pieces_of(solution_of(exercise)) if piece in hint]


def test_the_pieces_of_a_solution_are_its_lines_and_what_they_compute() -> None:
    code = "def f(x):  # a comment\n    y = x + x * 2\n\n    return None\n    return max(y, x)\n    z == y\n"
    assert pieces_of(code) == {"def f(x):", "y = x + x * 2", "x + x * 2", "return max(y, x)", "max(y, x)", "z == y"}


@pytest.mark.parametrize("number", [1, 2])
def test_a_verdict_has_the_hint_that_was_asked_for_in_a_line_of_its_own(number: int) -> None:
    hint = f"Hint {number}: {HINTS['m1.kv_bytes'][number - 1]}"
    verdict = check("m1.kv_bytes", open_exercise, hint=number)
    assert not verdict and verdict.message == f"Nothing is written here yet.\n{hint}"
    first, *others = repr(verdict).splitlines()
    assert first == "m1.kv_bytes: not yet. Nothing is written here yet." and " ".join(others) == hint
    assert max(map(len, others)) <= 110


def test_an_answer_that_passes_gets_its_hint_too() -> None:
    def slots(table: list[int], size: int, start: int, num: int) -> list[int]:
        return [table[p // size] * size + p % size for p in range(start, start + num)]

    verdict = check("m3.slots", slots, hint=2)
    assert verdict and verdict.message.endswith(HINTS["m3.slots"][1])


@pytest.mark.parametrize("number", [0, 3, -1, "1", 1.0, True])
def test_a_hint_that_does_not_exist_is_an_error(number: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"there is no hint {number!r}; there are hint=1 and hint=2")):
        check("m1.kv_bytes", open_exercise, hint=number)


def test_an_unknown_exercise_is_refused_whatever_the_hint() -> None:
    with pytest.raises(KeyError, match=r"there is no exercise 'm1\.nothing'"):
        check("m1.nothing", None, hint=3)
