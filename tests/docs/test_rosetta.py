"""docs/rosetta.md: every well-known name has a row, and every row says where Stepwise stands.

The names live in `seed_names.txt`, beside this file. A name counts when a table row holds it in backticks,
alone and spelled exactly so.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.sources import Module, Source

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


def test_what_is_planned_names_its_milestone() -> None:
    tags = re.findall(r"planned: *`?(\w*)", PAGE.read_text(encoding="utf-8"))
    assert all(re.fullmatch("m[3-9]", tag) for tag in tags), f"'planned:' must be followed by a milestone: {tags}"


def test_images_and_video_are_not_planned_any_more() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Multimodal") : text.index("## Disaggregation")]
    assert "planned" not in section


@pytest.fixture(scope="module")
def source() -> Source:
    return Source.from_packages(ROOT, [path.name for path in sorted(ROOT.glob("m[1-9]_*"))])


def claims(concept: str, here: str) -> Iterator[tuple[str, list[str]]]:
    """Each name in backticks of our column, and the milestones that have it: those in the next brackets, or the last.

    "Fields of" a class, or methods: those that the first column names.
    """
    tags = [(tag.start(), re.findall(r"m\d", tag[1])) for tag in re.finditer(r"\((m\d(?:, m\d)*)\b", here)]
    for name in re.finditer(r"(fields? of |methods? of )?(?<!No )`([^`]+)`", here):
        following = [milestones for start, milestones in tags if start > name.start()]
        milestones = following[0] if following else tags[-1][1] if tags else []
        yield name[2], milestones
        for member in re.findall(r"`([^`]+)`", concept) if name[1] else []:
            yield f"{name[2]}.{member}", milestones


def globals_of(module: Module) -> set[str]:
    """What a module defines at its top level."""
    found = set()
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def places(source: Source, milestone: str, name: str, beside: list[str]) -> list[str]:
    """The modules that define a name, a file's or a class's attribute of a milestone; `beside`: names in the same cell.

    A name without a dot may be an attribute of a class that stands beside it. One of a base class is where that is.
    """
    modules = [module for module in source.modules.values() if module.package.startswith(f"{milestone}_")]
    if name.endswith(".py"):
        return [module.name for module in modules if f"{module.name.replace('.', '/')}.py".endswith(f"/{name}")]
    owner, _, last = name.rpartition(".")
    found = [m.name for m in modules if last in globals_of(m) and (not owner or m.name.endswith(f".{owner}"))]
    if found:
        return found
    owners = [owner] if owner else [other.partition(".")[0] for other in beside]
    classes = [cls for cls in source.classes.values() if cls.package.startswith(f"{milestone}_")]
    lines = [[cls, *source.ancestors(cls)] for cls in classes if cls.node.name in owners]
    holders = [[cls for cls in line if last in cls.members or last in cls.attributes] for line in lines]
    return [line[0].module.name for line in holders if line]


TWO_MILESTONES = {
    "m1_a.engine": "LIMIT = 1\nclass Engine:\n    size: int\n    def step(self): self.turn = 0",
    "m2_b.engine": "from m1_a.engine import Engine as Plain\nclass Engine(Plain):\n    def stop(self): ...",
}


@pytest.mark.parametrize(
    ("milestone", "name", "found"),
    [
        ("m1", "Engine.step", True),
        ("m1", "Engine.turn", True),  # given to `self`
        ("m1", "Engine.stop", False),  # a later milestone has it
        ("m2", "Engine.turn", True),  # inherited
        ("m2", "Plain", False),  # imported only
        ("m2", "stop", True),  # of the class beside it
        ("m2", "LIMIT", False),
        ("m1", "engine.py", True),
    ],
)
def test_a_name_is_looked_up_in_one_milestone(milestone: str, name: str, found: bool) -> None:
    assert bool(places(Source.from_texts(TWO_MILESTONES), milestone, name, ["Engine"])) is found


def test_what_is_here_is_in_the_milestone_that_is_named(source: Source) -> None:
    wrong = []
    for concept, here, *_ in body_rows():
        named = list(claims(concept, here))
        for name, milestones in named:
            if not milestones:
                wrong.append(f"row {concept!r}: which milestone has {name}?")
            beside = [other for other, _ in named]
            wrong += [
                f"row {concept!r}: {milestone} has no {name}"
                for milestone in milestones
                if not places(source, milestone, name, beside)
            ]
    assert not wrong, "\n".join(wrong)


def test_our_names_lead_to_the_file_that_defines_them(source: Source) -> None:
    wrong = []
    for concept, here, *_ in body_rows():
        links = re.findall(r"\[`([^`]+)`\]\(\.\./([\w/]+)\.py\)", here)
        named = [(name, milestones) for name, milestones in claims(concept, here) if f"`{name}`" in here]
        assert [name for name, _ in links] == [name for name, _ in named], f"row {concept!r}: a name without a link"
        for (name, path), (_, milestones) in zip(links, named, strict=True):
            known = [module for tag in milestones for module in places(source, tag, name, [name for name, _ in named])]
            if path.replace("/", ".") not in known:
                wrong.append(f"row {concept!r}: {name} leads to {path}, and is in {known}")
    assert not wrong, "\n".join(wrong)


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
