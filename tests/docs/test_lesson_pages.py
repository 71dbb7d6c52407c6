"""The pages of the lessons: each has its frame, states how long it takes to read, and shows a few functions.

Minutes are counted with 200 words a minute, without code, tables, pictures and the targets of links.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("m[1-9]_*.md"))
WORDS_PER_MINUTE = 200
TEXTS = [pytest.param(path.read_text(encoding="utf-8"), id=path.stem) for path in PAGES]
each_page = pytest.mark.parametrize("text", TEXTS)


def num_words(text: str) -> int:
    """Return the number of words that a reader reads."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^(\||--8<--|!\[|\[code: |\[player: ).*?$", "", text, flags=re.M | re.S)
    return len(re.sub(r"\]\([^)]*\)|</?\w[^>]*>", " ", text).split())


def minutes(text: str) -> int:
    """Return the minutes that a page states."""
    (stated,) = re.findall(r"^\*(\d+) minutes to read", text, re.M)
    return int(stated)


@each_page
def test_a_page_begins_with_goals_minutes_and_what_to_know_before(text: str) -> None:
    head = text.partition("\n## ")[0]
    goals = head[head.index("**You will be able to**") :].split("\n\n")[1]
    assert 2 <= len(re.findall(r"^- ", goals, re.M)) <= 4
    assert minutes(head) and "Before:" in head


@each_page
def test_the_minutes_are_those_of_its_words(text: str) -> None:
    assert abs(minutes(text) - num_words(text) / WORDS_PER_MINUTE) <= 2, num_words(text)


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in PAGES
        if path.stem[:2] in ("m3", "m6") or path.stem in ("m4_tiers", "m4_tiers_measured", "m4_preemption")
    ],
    ids=lambda path: path.stem,
)
def test_a_page_of_the_long_lessons_takes_a_quarter_of_an_hour_at_most(path: Path) -> None:
    assert minutes(path.read_text(encoding="utf-8")) <= 15


@each_page
def test_a_page_ends_with_five_lines_and_three_questions(text: str) -> None:
    lines, _, questions = text[text.index("\n## In five lines\n") :].partition("\n## Three questions\n")
    assert re.findall(r"^(\d)\. ", lines, re.M) == ["1", "2", "3", "4", "5"]
    found = re.findall(r'^<details markdown="1"><summary>.+?</summary>\n\n(.+?)\n\n</details>$', questions, re.M | re.S)
    assert len(found) == 3 and "\n## " not in questions


@each_page
def test_a_page_shows_two_to_four_functions_and_folds_none(text: str) -> None:
    assert 2 <= len(re.findall(r"^\[code: [\w.]+\]\(\.\./[\w/]+\.py\)$", text, re.M)) <= 4
    assert "\n::: " not in text
