"""The page of solutions: a section for each exercise, to which its notebook links, with the call that shows a hint."""

import re

import pytest

from notebooks.progress import exercises
from tests.notebooks.exercises import TAUGHT, Exercises
from tests.notebooks.lessons import SOLUTIONS, sections, source

PLACES = {exercise.name: exercise.place for exercise in exercises()}


def anchor(heading: str) -> str:
    """The anchor of a heading, on the site as on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_page_has_the_exercises_in_the_order_of_the_notebooks_each_with_its_place_and_one_solution() -> None:
    assert list(sections()) == list(PLACES)
    for exercise, text in sections().items():
        place = PLACES[exercise].partition(", ")[2]
        assert text.startswith(f"\n*{place[0].upper()}{place[1:]}.*\n\n```python\n"), exercise
        assert len(re.findall("^```python$", text, re.MULTILINE)) == 1


def test_no_two_headings_have_the_same_anchor() -> None:
    headings = re.findall(r"^#+ (.+)$", re.sub("```.*?```", "", SOLUTIONS.read_text(), flags=re.DOTALL), re.MULTILINE)
    assert len(set(map(anchor, headings))) == len(headings) == 1 + len(TAUGHT) + len(PLACES)


@pytest.mark.parametrize("taught", TAUGHT, ids=str)
def test_the_cell_after_a_check_names_its_hints_and_links_to_its_solution(taught: Exercises) -> None:
    asked: list[str] = []
    found: list[str] = []
    for cell in taught.lesson.all_cells():
        text = source(cell)
        if cell["cell_type"] == "code":
            asked += re.findall(r'^check\("([\w.]+)"', text, re.MULTILINE)
        elif asked:
            line = text.partition("\n")[0]
            for exercise in asked:
                assert f'`check("{exercise}", {taught.answers[exercise]}, hint=1)`' in line and "`hint=2`" in line
            assert re.findall(r"\]\(\.\./docs/solutions\.md#([\w-]+)\)", line) == list(map(anchor, asked))
            found, asked = found + asked, []
    assert found == list(taught.answers) and not asked


@pytest.mark.parametrize("taught", TAUGHT, ids=str)
def test_a_notebook_folds_no_code(taught: Exercises) -> None:
    cells = map(source, taught.lesson.cells("markdown"))
    assert not [cell for cell in cells if re.search(r"<details>.*?```.*?</details>", cell, re.DOTALL)]
