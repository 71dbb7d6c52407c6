"""The hook of the site's look: pictures in two schemes, slim notebooks, whole names, an example of each event."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.look import event_sentences, on_page_content
from m1_single_request.events import Admit
from tests.events.milestones import MILESTONES, event_classes, event_modules

ROOT = Path(__file__).parents[2]
NOTEBOOK = """<script>clipboard</script><style>* { color: red }</style>
<div class="jupyter-wrapper"><div class="jp-Notebook">
<h2 id="One">One<a class="anchor-link" href="#One">¶</a></h2>
<div class="zeroclipboard-container">
    <clipboard-copy for="cell-1"><div><span class="notice" hidden>Copied!</span></div></clipboard-copy>
</div>
<div class="highlight-ipynb hl-python "><pre><span></span><span class="n">x</span> <span class="o">=</span> 1
</pre></div>
<div class="clipboard-copy-txt" id="cell-1">x = 1</div>
<div class="jp-OutputArea"><script>shown()</script>
<span style="color: #008000; text-decoration-color: #008000; font-weight: bold">ok</span>
<span style="color: #000000; text-decoration-color: #000000; background-color: #008000">P</span>
<div class="highlight" style="background: #272822"><pre style="margin: 0"><span></span><span style="color: #66D9EF">\
def</span><span style="color: #F8F8F2"> </span>f
</pre></div></div>
</div></div>
<style>['...']</style>
"""


def shown(content: str, source: str, *toc: SimpleNamespace) -> str:
    """A page after the hook."""
    return on_page_content(content, SimpleNamespace(file=SimpleNamespace(src_uri=source), toc=toc, meta={}))


def entry(*children: SimpleNamespace) -> SimpleNamespace:
    """An entry of a table of contents."""
    return SimpleNamespace(children=list(children))


def test_a_picture_is_shown_in_the_scheme_of_the_page() -> None:
    found = re.findall(
        r'<img src="(.*?)" width="\d+" height="\d+" loading="lazy" alt="The packages">',
        shown('<p><img alt="The packages" src="../assets/packages.svg" /></p>', "m1_single_request.md"),
    )
    assert found == ["../assets/packages.svg#only-light", "../assets/packages.svg#only-dark"]


def test_a_page_is_named_by_its_heading_and_its_diagrams_have_a_box() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="m1_single_request.md"), toc=(), meta={})
    content = '<h1 id="m1">m1: <em>one</em> request<a class="headerlink">¶</a></h1><pre class="mermaid">a\nb</pre>'
    assert '<div class="diagram"><pre class="mermaid">a\nb</pre></div>' in on_page_content(content, page)
    assert page.meta == {"title": "m1: one request"}


def test_other_images_are_left_alone() -> None:
    image = '<img alt="" src="https://host/assets/packages.svg"><img src="assets/photo.png">'
    assert shown(image, "index.md") == image


def test_a_notebook_keeps_its_cells_and_outputs_and_no_style_of_jupyter() -> None:
    page = shown(NOTEBOOK, "notebooks/m1_single_request.ipynb")
    assert "<style" not in page and "clipboard" not in page and "<script>shown()</script>" in page
    cell = '<span class="n">x</span> <span class="o">=</span> 1'
    assert f'<div class="highlight"><pre><code>{cell}\n</code></pre></div>' in page
    assert 'class="headerlink"' in page
    assert '<span style="color: var(--green); font-weight: bold">ok</span>' in page
    assert '<div class="highlight"><pre><code><span class="k">def</span> f\n</code></pre></div>' in page
    assert '<span style="color: #000000; background-color: #008000">P</span>' in page


def test_names_in_the_tables_of_rosetta_break_behind_dots_only() -> None:
    page = shown("<td><code>Scheduler.add_request</code>, <code>fetch.py</code> and v0.5</td>", "rosetta.md")
    assert "<code>Scheduler.<wbr>add_request</code>, <code>fetch.py</code> and v0.5" in page


def test_the_reference_has_no_empty_lines_and_no_anchors_of_lines_in_signatures() -> None:
    signature = '<a id="__codelineno-0-2" name="__codelineno-0-2" href="#x"></a>    <span class="n">config</span>\n\n'
    page = shown(f"<div>\n\n\n  <pre><code>{signature}</code></pre>\n\n</div>", "api/parts.md")
    assert page == "<div>\n<pre><code>    config\n\n</code></pre>\n</div>"


@pytest.mark.parametrize(("page", "methods"), [("api/parts.md", 0), ("api/face.md", 1)])
def test_contents_of_the_reference_end_with_classes_but_on_the_page_of_the_face(page: str, methods: int) -> None:
    of_class = entry(entry())
    shown("", page, entry(entry(of_class)))
    assert len(of_class.children) == methods


@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_event_has_an_example_on_its_page(milestone: str) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("events*.md"))
    assert {module.__name__ for module in event_modules(milestone)} <= set(re.findall(r"^::: (\S+)$", pages, re.M))
    for event in event_classes(milestone):
        name = f"{event.__module__}.{event.__qualname__}"
        section = f'<h3 id="{name}" class="doc doc-heading">x</h3><div><p>What it is.</p><p>More.</p></div>'
        sentence = re.search(r"</p><p class=\"event-example\">(.+?)</p><p>More", shown(section, "api/events.md"))
        assert sentence, name


def test_an_example_is_the_sentence_of_the_event() -> None:
    admit = Admit(rid="req-7", prefix=0, extend=31, num_waiting=0)
    assert event_sentences()["m1_single_request.events.Admit"] == admit.explain()
