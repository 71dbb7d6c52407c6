"""docs/rosetta.md: every well-known name has a row, and every row says where Stepwise stands.

The names live in `seed_names.txt`, beside this file. A name counts when a table row holds it in backticks,
alone and spelled exactly so.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "rosetta.md"
COLUMNS = ["Concept / name", "Here", "vLLM", "SGLang", "mini-sglang", "nano-vllm"]


def seed_names() -> list[str]:
    """The names to look for, each once, in the order of the file."""
    lines = (line.strip() for line in (HERE / "seed_names.txt").read_text(encoding="utf-8").splitlines())
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


def table_rows() -> list[list[str]]:
    """The cells of every table row of the page, without the lines of dashes."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not all(set(cell) <= set("-:") for cell in row)]


def body_rows() -> list[list[str]]:
    """The rows without the headings of the tables."""
    return [row for row in table_rows() if row != COLUMNS]


@pytest.fixture(scope="module")
def names_on_the_page() -> set[str]:
    return {name for row in body_rows() for cell in row for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("name", seed_names())
def test_every_name_has_a_row(name: str, names_on_the_page: set[str]) -> None:
    assert name in names_on_the_page, f"docs/rosetta.md has no table row with `{name}` in backticks"


def test_a_planned_milestone_is_one_of_m2_to_m6() -> None:
    tags = re.findall(r"planned: *`?(\w*)", PAGE.read_text(encoding="utf-8"))
    wrong = sorted(set(tags) - {"m2", "m3", "m4", "m5", "m6"})
    assert not wrong, f"'planned:' must be followed by m2 ... m6, not by {wrong}"


def test_every_table_has_the_same_columns() -> None:
    headings = [row for row in table_rows() if row[0] == COLUMNS[0]]
    assert headings and all(row == COLUMNS for row in headings)
    for row in body_rows():
        assert len(row) == len(COLUMNS) and all(row), f"row {row[0]!r} needs {len(COLUMNS)} cells, none of them empty"


def test_every_row_says_where_it_is_here() -> None:
    for concept, here, *_ in body_rows():
        assert re.search(r"\(m\d\b|planned: m\d|not here\b.*\bbecause ", here), (
            f"row {concept!r}: Here must name a milestone, 'planned: mN' or 'not here, because ...', not {here!r}"
        )
