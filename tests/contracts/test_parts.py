"""The parts that a learner can build: every reference passes, every starter fails, and typical mistakes get their hint.

One mistake of each part is graded by default, and all of them exhaustively.
"""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.parts import slug
from tests.contracts.in_engine import answer
from tests.contracts.part import ROOT, STARTERS, Part, all_parts, function_of, grade, loaded

PARTS = all_parts()
WRONG = {name: importlib.import_module(f"tests.contracts.wrong.{name}").WRONG for name in PARTS}
MISTAKES = [
    pytest.param(name, number, id=f"{name}-{number}") for name, wrong in WRONG.items() for number in range(len(wrong))
]
by_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)


def starter_of(part: Part) -> Any:
    return loaded(f"{STARTERS / part.name}.py:{part.starter}")


@by_part
def test_the_reference_keeps_the_contract(part: Part) -> None:
    assert grade(part, part.reference) == []


@by_part
def test_a_starter_fails_because_nothing_is_written(part: Part) -> None:
    failures = grade(part, starter_of(part))
    assert len(failures) == len(part.behaviours)
    assert all("nothing is written here yet" in failure.text for failure in failures), failures[0].text


@pytest.mark.sample(of=lambda name, **_: {name})
@pytest.mark.parametrize(("name", "number"), MISTAKES)
def test_a_mistake_gets_its_hint(name: str, number: int) -> None:
    solution, hint = WRONG[name][number]
    texts = [failure.text for failure in grade(PARTS[name], solution, limit_s=3)]
    assert texts, "it passes"
    assert any(hint in text for text in texts), "\n\n".join(texts)


@by_part
def test_there_are_three_mistakes_at_least(part: Part) -> None:
    assert len(WRONG[part.name]) >= 3


@by_part
def test_a_starter_asks_for_what_the_engine_calls(part: Part) -> None:
    """Its methods take the same arguments, and each says what it has to do."""
    starter, reference = starter_of(part), part.reference
    for name, ours, theirs in methods_of(starter, reference):
        assert parameters(ours) == parameters(theirs), name
        assert inspect.getdoc(function_of(ours)), f"{name} has no docstring"


def methods_of(starter: Any, reference: Any) -> list[tuple[str, Any, Any]]:
    """What a learner has to write, each with the reference's own."""
    if not isinstance(starter, type):
        return [(starter.__name__, starter, reference)]
    written = {name: value for name, value in vars(starter).items() if inspect.isfunction(value)}
    return [(name, value, getattr(reference, name)) for name, value in written.items()]


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function_of(function)).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@by_part
def test_the_lesson_has_the_section(part: Part) -> None:
    file, _, anchor = part.lesson.partition("#")
    headings = re.findall(r"^#+ (.*?)$", (ROOT / file).read_text(encoding="utf-8"), re.M)
    assert anchor in map(slug, headings)


@by_part
def test_a_starter_says_how_it_is_graded(part: Part) -> None:
    text = (STARTERS / f"{part.name}.py").read_text(encoding="utf-8")
    assert f"pytest --part {part.name}=" in text and f":{part.starter}\n" in text


@pytest.mark.exhaustive
@by_part
def test_an_engine_with_the_reference_answers_as_before(part: Part, references: Any, reference_model: Any) -> None:
    if part.variant:
        with part.in_place(part.reference):
            answer(part, part.reference, references, reference_model, every=4)


def test_there_are_twenty_parts_and_two_of_each_milestone() -> None:
    milestones = [part.target.split("_")[0] for part in PARTS.values()]
    assert len(PARTS) >= 20 and all(milestones.count(f"m{number}") >= 2 for number in range(1, 8))


# --- the command ------------------------------------------------------------------------------------------------------


def pytest_part(named: str, folder: Path) -> tuple[int, str]:
    """Run `pytest --part`, as a learner does; the exit status and the output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--part", named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr
