"""What holds for the notebook of every milestone: solutions pass, open exercises do not, and what is stored is true."""

import pytest

from benchmarks import RESULTS
from notebooks.checks import GRADERS
from tests.notebooks.exercises import TAUGHT, Exercises, open_exercise
from tests.notebooks.lessons import NOTEBOOKS

each_lesson = pytest.mark.parametrize("taught", TAUGHT, ids=str)
each_exercise = pytest.mark.parametrize(
    ("taught", "exercise"),
    [pytest.param(taught, exercise, id=exercise) for taught in TAUGHT for exercise in taught.answers],
)


# --- exercises --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(14)
@each_exercise
def test_the_solution_of_every_exercise_passes(taught: Exercises, exercise: str) -> None:
    verdict = taught.check(exercise, taught.lesson.solutions()[taught.answers[exercise]])
    assert verdict, verdict


@pytest.mark.sample(15)
@each_exercise
def test_an_open_exercise_is_a_verdict_and_not_an_exception(taught: Exercises, exercise: str) -> None:
    verdict = taught.check(exercise, open_exercise)
    assert not verdict
    assert verdict.message


@each_lesson
def test_every_exercise_is_checked_in_the_notebook_with_the_name_that_its_solution_has(taught: Exercises) -> None:
    assert set(taught.answers.values()) <= taught.lesson.solutions().keys()
    assert set(taught.answers) == {name for name in GRADERS if name.startswith(taught.prefix)}


@pytest.mark.sample(2)
@each_lesson
def test_the_engines_own_code_passes_where_it_is_the_reference(taught: Exercises) -> None:
    for exercise, code in taught.own_code.items():
        verdict = taught.check(exercise, code)
        assert verdict, verdict


# --- notebooks --------------------------------------------------------------------------------------------------------


def test_every_notebook_of_a_milestone_is_among_them() -> None:
    assert sorted(map(str, TAUGHT)) == sorted(path.stem for path in NOTEBOOKS.glob("m[1-9]_*.ipynb"))


@each_lesson
def test_the_notebook_is_stored_as_it_ran_from_top_to_bottom_without_errors_or_machine_paths(taught: Exercises) -> None:
    taught.lesson.assert_stored_as_it_ran()


@pytest.mark.sample(1)
@each_lesson
def test_the_stored_outputs_come_from_the_checkpoint_that_ships(taught: Exercises) -> None:
    question, stored = taught.lesson.first_answer()
    with taught.package.LLMEngine() as engine:
        assert stored == engine.chat([{"role": "user", "content": question}]).text


@pytest.mark.sample(2)
@pytest.mark.parametrize("taught", [taught for taught in TAUGHT if taught.traced_steps], ids=str)
def test_the_trace_on_the_page_is_what_the_engine_says_today(taught: Exercises) -> None:
    assert (RESULTS / f"{taught}_trace.txt").read_text(encoding="utf-8") == taught.traced_steps()
