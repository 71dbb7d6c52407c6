"""docs/rosetta.md: every well-known name has a row, and every row says where Stepwise stands.

The names live in `seed_names.txt`, beside this file. A name counts when a table row holds it in backticks,
alone and spelled exactly so.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "rosetta.md"
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


def test_only_the_second_half_of_m6_is_planned() -> None:
    tags = re.findall(r"planned: *`?(\w*)", PAGE.read_text(encoding="utf-8"))
    assert set(tags) <= {"m6"}, f"'planned:' must be followed by m6, not by {sorted(set(tags) - {'m6'})}"


def test_images_and_video_are_not_planned_any_more() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Multimodal") : text.index("## Disaggregation")]
    assert "planned" not in section


def test_what_is_here_is_in_the_code() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("m[1-6]_*/**/*.py")]
    known = {word for source in sources for word in re.findall(r"[A-Za-z_]\w*", source)}
    for concept, here, *_ in body_rows():
        if "planned: " in here or "not here" in here:
            continue
        named = re.findall(r"(?<!No )`([A-Za-z_][\w.]*)`", here)
        missing = [name for name in named if not known.issuperset(name.removesuffix(".py").split("."))]
        assert not missing, f"row {concept!r}: {missing} is nowhere in the milestones"


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
