"""The parts that a learner can build: every reference passes, every starter fails, and typical mistakes get their hint.

One mistake of each part is graded by default, and all of them exhaustively.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.parts import slug
from tests.contracts.in_engine import answer
from tests.contracts.part import (
    ROOT,
    STARTERS,
    Part,
    all_parts,
    found,
    function_of,
    grade,
    kind_of,
    loaded,
    refusal,
    substituted,
)
from tests.contracts.plugin import ENGINE_TEST, chosen_by, verdict

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
def test_a_solution_of_the_right_kind_is_taken(part: Part) -> None:
    for solution in (part.reference, starter_of(part), *(wrong for wrong, _ in WRONG[part.name])):
        assert refusal(part, solution, "mine") == ""


@by_part
def test_a_solution_of_another_kind_is_refused(part: Part) -> None:
    """A class takes the place of no function. A function that makes an object may take the place of a class."""

    def make(**arguments: Any) -> None: ...

    wanted = kind_of(part.reference)
    for_a_class, for_a_function = refusal(part, Part, "Mine"), refusal(part, make, "make")
    assert for_a_class == ("" if wanted == "a class" else f"{part.name} is {wanted}, and Mine is a class")
    assert bool(for_a_function) == (part.name == "store_kv")
    expected = f"{part.name} is {wanted}, and TABLE is of type dict, and cannot be called"
    assert refusal(part, {}, "TABLE") == expected


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
    assert f"Explained in {part.lesson}.\n" in text


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


def pytest_part(named: str, *more: str) -> tuple[int, str]:
    """Run `pytest --part`, as a learner does; the exit status and the output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--part", named, *more]
    env = os.environ | {"STEPWISE_PROGRESS": "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


HEAP = "from m4_radix_cache.mem_cache.eviction import EvictionHeap as MyEvictionHeap"
TARGET = "m4_radix_cache.mem_cache.eviction:EvictionHeap"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["eviction_heap", TARGET])
def test_a_solution_passes_and_an_engine_runs_with_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAP)
    status, out = pytest_part(f"{name}={tmp_path}/mine.py:MyEvictionHeap")
    assert status == 0 and "eviction_heap: 10 of 10 behaviours, and an engine runs with it" in out


def test_the_last_line_says_what_was_run() -> None:
    heap, router = PARTS["eviction_heap"], PARTS["router_choice"]
    assert verdict(heap, {*heap.behaviours}) == "eviction_heap: 10 of 10 behaviours; the engine does not"
    assert verdict(heap, {"test_a_node_may_come_back", ENGINE_TEST}).startswith(
        "eviction_heap: 1 of 10 behaviours; read"
    )
    assert verdict(router, {*router.behaviours}).endswith("behaviours; no engine of the suite runs this part")


@pytest.mark.exhaustive
def test_a_starter_is_told_what_to_do_once(tmp_path: Path) -> None:
    status, out = pytest_part(f"eviction_heap={STARTERS}/eviction_heap.py:MyEvictionHeap")
    assert status == 1 and "eviction_heap: 0 of 10 behaviours" in out
    assert out.count("to do:    nothing is written here yet (in `__init__`") == 1 and out.count("(the same)") == 9


WRONGLY_NAMED = [
    ("nothing=mine.py:A", "there is no part 'nothing'; there are allocator, "),
    ("eviction heap=FOLDER/mine.py:Mine", "there is no part 'eviction heap': did you mean eviction_heap?"),
    ("", "--part NAME=FILE.py:CLASS: there is no part ''"),
    ("eviction_heap=none.py:A", "there is no file 'none.py'"),
    ("eviction_heap", "a file and what is in it must be named: --part eviction_heap=my_file.py:MyEvictionHeap"),
    ("eviction_heap=FOLDER/mine.py:Nobody", "mine.py has no 'Nobody'; it has Other"),
    ("eviction_heap=FOLDER/broken.py:A", "broken.py, line 2: SyntaxError: "),
    ("eviction_heap=FOLDER/ends.py:A", "ends.py, line 2: it ends Python while it is loaded"),
    ("eviction_heap=FOLDER/raises.py:A", "raises.py, line 2: ModuleNotFoundError: No module named 'nothing_here'"),
    ("m4_radix_cache.nothing:A=FOLDER/mine.py:Other", "m4_radix_cache.nothing:A: No module named"),
    (f"{TARGET}s=FOLDER/mine.py:Other", "there is no 'EvictionHeaps' in"),
    ("image_key=FOLDER/mine.py:Other", "image_key is a function, and Other is a class"),
]
FILES = {
    "mine": f"{HEAP}\nclass Other: pass",
    "broken": "# a comment\nx = = 1",
    "ends": "# a comment\nraise SystemExit(0)",
    "raises": "# a comment\nimport nothing_here",
}


@pytest.mark.parametrize(("named", "expected"), WRONGLY_NAMED)
def test_what_cannot_be_graded_is_an_error_in_a_line(named: str, expected: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(LookupError) as refused:
        chosen_by(named.replace("FOLDER", str(tmp_path)))
    assert expected in str(refused.value.args[0])


def test_a_file_that_is_never_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("# a comment\nwhile True: pass")
    monkeypatch.setattr("tests.contracts.part.LIMIT_S", 0.1)
    with pytest.raises(LookupError, match=r"mine\.py, line 2: it is not loaded after 0\.1 s: does a loop not end"):
        chosen_by(f"eviction_heap={tmp_path}/mine.py:A")


@pytest.mark.exhaustive
def test_one_part_is_graded_at_a_time() -> None:
    status, out = pytest_part("eviction_heap=a.py:A", "--part", "block_pool=b.py:B")
    assert status == 4 and "--part is given twice: one part is graded at a time" in out


ENDLESS = """
class MyEvictionHeap:
    def __init__(self, strategy):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
"""


@pytest.mark.exhaustive
def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENDLESS)
    status, out = pytest_part(f"eviction_heap={tmp_path}/mine.py:MyEvictionHeap")
    assert status == 1 and ("does a loop not end?" in out or "catches what should stop it" in out)


def test_a_name_is_put_into_tables_and_importers_and_taken_out_again() -> None:
    target, mine = "m4_radix_cache.mem_cache.eviction:STRATEGIES.slru", object()
    before = found(target)
    with substituted(target, mine):
        assert found(target) is mine and PARTS["eviction_strategy"].reference is mine
    assert found(target) is before
    with substituted(TARGET, mine):
        assert importlib.import_module("m4_radix_cache.mem_cache.radix_cache").EvictionHeap is mine
        assert PARTS["eviction_heap"].reference is mine
    assert importlib.import_module("m4_radix_cache.mem_cache.radix_cache").EvictionHeap is found(TARGET) is not mine
