"""The tables of files and the picture of the packages show today's code."""

from pathlib import Path

from docs.house import IDEAS, PACKAGES, READING, ROOT, code_lines, imports, outdated


def test_tables_and_picture_are_those_of_the_code() -> None:
    assert not outdated(), "run: python -m docs.house"


def test_each_lesson_names_eight_to_ten_files_in_their_order() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("m[1-9]_*.md"))]
    for part, rows in READING.items():
        (page,) = [text for text in pages if f"reading order: {part} " in text]
        assert 8 <= len(rows) <= 10 and len({name for name, _ in rows}) == len(rows), part
        places = [page.find(f"/{name}) | ", page.find(f"reading order: {part} ")) for name, _ in rows]
        assert places == sorted(places) and min(places) > 0, part


def test_the_packages_are_the_milestones_and_import_earlier_ones_only() -> None:
    assert sorted(IDEAS) == sorted(path.name for path in ROOT.glob("m[1-9]_*") if path.is_dir())
    for number, package in enumerate(PACKAGES):
        assert set(imports(package)) <= set(PACKAGES[:number])


def test_a_line_of_code_is_no_comment_no_blank_and_no_docstring(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    lines = ['"""A docstring', 'of two lines."""', "", "# a comment", "x = (", "    1,", ")"]
    path.write_text("\n".join([*lines, "def f():", '    """One."""', "    return x"]))
    assert code_lines(path) == 5
