"""Links to source code: to pages of files, to lines of names, and code shown in a page; source pages."""

import logging
import re
from pathlib import Path

import pytest

from docs import code_links, source_code
from docs.code_links import link_html, link_source, page_of
from docs.highlight import highlight
from docs.source_code import definitions, read_lines, source_files
from docs.source_pages import source_page

PYTHON = '''
LIMIT = 3
"""How many."""


@final
class Pool:
    size: int

    def __init__(self):
        self.free = []

    @property
    def count(self):
        def inner():
            return 1

        return inner()

    @count.setter
    def count(self, value): ...


if LIMIT:
    def late(): return "[x](../m1_a/pool.py)"
'''
CPP = """
template <class T> constexpr bool IS_OWN = sizeof(T) == 1;

// Add them.
template <class T, class K>
inline long add(const T* a,
                const K* b) {
    if (a) { return "}"; }  // }
    return call(b);
}

struct Tile {  // of queries
    long size;

    void weigh(long from) {
        for (long i = 0; i < from; i++) add(i, i);
    }
};
long call(long b) { return b; }
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two files."""
    for module in (source_code, code_links):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    folder = tmp_path / "m1_a"
    folder.mkdir()
    (folder / "pool.py").write_text(PYTHON.lstrip())
    (folder / "tile.h").write_text(CPP.lstrip())
    return folder


def shown(path: str, name: str) -> tuple[str, str]:
    """First and last line of a definition."""
    first, last = definitions(path)[name]
    lines = read_lines(path)
    return lines[first - 1].strip(), lines[last - 1].strip()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("LIMIT", "LIMIT = 3", '"""How many."""'),
        ("Pool", "@final", "def count(self, value): ..."),
        ("Pool.size", "size: int", "size: int"),
        ("Pool.free", "self.free = []", "self.free = []"),
        ("Pool.count", "@property", "return inner()"),
        ("Pool.count.inner", "def inner():", "return 1"),
        ("late", 'def late(): return "[x](../m1_a/pool.py)"', 'def late(): return "[x](../m1_a/pool.py)"'),
    ],
)
def test_python_names(package: Path, name: str, first: str, last: str) -> None:
    assert shown("m1_a/pool.py", name) == (first, last)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("IS_OWN", *["template <class T> constexpr bool IS_OWN = sizeof(T) == 1;"] * 2),
        ("add", "// Add them.", "}"),
        ("Tile", "struct Tile {  // of queries", "};"),
        ("Tile.weigh", "void weigh(long from) {", "}"),
        ("call", *["long call(long b) { return b; }"] * 2),
    ],
)
def test_cpp_names(package: Path, name: str, first: str, last: str) -> None:
    assert shown("m1_a/tile.h", name) == (first, last)
    assert set(definitions("m1_a/tile.h")) == {"IS_OWN", "add", "Tile", "Tile.weigh", "call"}


def test_a_link_leads_to_the_page_of_a_file_or_to_the_line_of_a_name(package: Path) -> None:
    text = "[`Pool.count`](../m1_a/pool.py), [a\nb](../m1_a/pool.py), [`pool.py`](../m1_a/pool.py), [x](../m1_a/tile.h)"
    expected = ["code/m1_a/pool.py.html#L12", *["code/m1_a/pool.py.html"] * 2, "code/m1_a/tile.h.html"]
    assert re.findall(r"\((.*?)\)", link_source(text, "a.md")) == expected
    assert re.findall(r"\((.*?)\)", link_source(text, "api/a.md")) == [f"../{each}" for each in expected]


def test_a_notebook_links_in_the_same_way(package: Path) -> None:
    text = '<p><a class="x" href="../m1_a/pool.py"><code>Pool</code></a> <a href="../m1_a/tile.h#L2">two</a></p>'
    html = link_html(text, "notebooks/a.ipynb", "../../")
    assert re.findall('href="(.*?)"', html) == ["../../code/m1_a/pool.py.html#L5", "../../code/m1_a/tile.h.html#L2"]


def test_a_paragraph_becomes_the_code_without_its_margin(package: Path) -> None:
    block = link_source("Text.\n\n[code: Pool.count](../m1_a/pool.py)\n\nMore.", "a.md")
    assert '{ .python title="m1_a/pool.py:12" linenums="12" }\n@property\ndef count(self):\n    def inner' in block
    assert block.endswith("    return inner()\n`````\n\nMore.")
    assert "{ .cpp title=" in link_source("    [code: Tile](../m1_a/tile.h)", "a.md")
    assert "(../m1_a/pool.py)" in link_source("[code: late](../m1_a/pool.py)", "a.md"), "code is not changed"


def test_the_title_of_code_is_a_link() -> None:
    title = '<span class="filename">m1_a/pool.py:12</span>'
    assert link_html(title, "a.md", "../") == title.replace(
        "m1_a/pool.py:12", '<a href="../code/m1_a/pool.py.html#L12">m1_a/pool.py:12</a>'
    )


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[code: Pool.gone](../m1_a/pool.py)", "shows the code of Pool.gone in m1_a/pool.py, which defines no such"),
        ("[code: Pool](../m1_a/gone.py)", "shows the code of Pool in m1_a/gone.py"),
        ("See [code: Pool](../m1_a/pool.py).", "needs a file of a package and a paragraph of its own"),
        ("[`Pool.gone`](../m1_a/pool.py)", "links to `Pool.gone` in m1_a/pool.py, which defines no such name"),
        ("[pool](../m1_a/gone.py)", "links to m1_a/gone.py, which does not exist"),
        ("[pool](../m1_a/pool.py#L99)", "links to line 99 of m1_a/pool.py, which has fewer lines"),
    ],
)
def test_what_does_not_exist_fails_the_build(
    package: Path, caplog: pytest.LogCaptureFixture, text: str, warning: str
) -> None:
    link_source(text, "a.md")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("a.md") and warning in caplog.messages[0]


def test_headings_of_the_reference_link_to_the_source() -> None:
    heading = '<h3 id="m1_single_request.scheduler.Scheduler.schedule" class="doc doc-heading">x</h3>'
    first = definitions("m1_single_request/scheduler.py")["Scheduler.schedule"].first
    linked = link_html(heading, "api/parts.md", "../../")
    assert f'href="../../{page_of("m1_single_request/scheduler.py", first)}"' in linked and linked.endswith("</a></h3>")


def test_highlighted_lines_are_the_lines_of_the_code() -> None:
    code = 'def f(x):\n    """One\n\n    <two>"""\n    return x < "a"'
    lines = highlight(code, "python")
    assert [re.sub("<.*?>", "", line).replace("&lt;", "<").replace("&gt;", ">") for line in lines] == code.split("\n")
    assert all(line.count("<span") == line.count("</span>") for line in lines)


PAGES = [path for path in source_files() if path.endswith("scheduler.py") or "/native/" in path]


@pytest.mark.parametrize("path", PAGES)
def test_a_source_page_has_all_lines_and_links_to_pages(path: str) -> None:
    paths = source_files()
    text = source_page(path, paths)
    numbers = [int(number) for number in re.findall(r'<span id="L(\d+)">', text)]
    assert numbers == list(range(1, len((source_code.ROOT / path).read_text(encoding="utf-8").splitlines()) + 1))
    links = re.findall(rf'href="{re.escape("../" * page_of(path).count("/"))}(code/[^"]+)"', text)
    assert set(links) <= set(map(page_of, paths)) and (links or path.endswith((".h", ".cpp")))
