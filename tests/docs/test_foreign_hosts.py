"""The check of a built site finds what a page loads from another host, and lets links and names be."""

from pathlib import Path

import pytest

from tests.docs.foreign_hosts import foreign_loads

ROOT = Path(__file__).parents[2]
OWN = '<script src="../assets/mermaid.min.js" defer></script>'
DIAGRAM = '<pre class="mermaid"><code>flowchart LR</code></pre>'


def loads(folder: Path, text: str, name: str = "lesson/index.html") -> list[str]:
    """What the check finds in a site with this one file, and a script that is there."""
    for path, content in {"assets/mermaid.min.js": "", name: text}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return list(foreign_loads(folder))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example.com/x.js"></script>',
        '<script src="//cdn.example.com/x.js"></script>',
        "<SCRIPT SRC=HTTP://cdn.example.com/x.js></SCRIPT>",
        '<script type="module">const m = await import("https://cdn.example.com/x.mjs")</script>',
        "<script>script.src = `//cdn.example.com/x.js`</script>",
        '<link rel="stylesheet" href="https://cdn.example.com/x.css">',
        '<link rel="preconnect" href="https://cdn.example.com">',
        '<link rel="shortcut icon" href="https://cdn.example.com/x.png">',
        '<img src="https://cdn.example.com/x.png">',
        '<img srcset="x.png 1x, https://cdn.example.com/x.png 2x">',
        '<iframe src="https://cdn.example.com/"></iframe>',
        '<video poster="https://cdn.example.com/x.png"></video>',
        '<object data="https://cdn.example.com/x.svg"></object>',
        '<svg><image href="https://cdn.example.com/x.png"/></svg>',
        '<p style="background: url(https://cdn.example.com/x.png)">',
        '<style>@import "https://cdn.example.com/x.css";</style>',
        "<style>@font-face { src: url('//cdn.example.com/x.woff2') }</style>",
    ],
)
def test_a_page_that_loads_from_another_host_is_found(html: str, tmp_path: Path) -> None:
    (found,) = loads(tmp_path, f"<html><body>{html}</body></html>")
    assert found.startswith("lesson/index.html loads ") and "//cdn.example.com" in found.lower()


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://example.com/">read there</a>',
        '<link rel="canonical" href="https://example.com/lesson/">',
        '<script src="../assets/x.js"></script><img src="x.png"><img src="data:image/png;base64,AAAA//BB.CC/">',
        '<svg xmlns="http://www.w3.org/2000/svg"><use xlink:href="#a"/></svg>',
        '<script>document.createElementNS("http://www.w3.org/2000/svg", "g") /* "https://example.com/x" */</script>',
        "<style>a { background: url(\"data:image/svg+xml,%3csvg xmlns='http://www.w3.org/2000/svg'/%3e\") }</style>",
        "<code>&lt;script src=\"https://cdn.example.com/x.js\"&gt;</code>",
    ],
)  # fmt: skip
def test_links_names_and_own_files_are_no_loads(html: str, tmp_path: Path) -> None:
    assert loads(tmp_path, html) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("assets/x.css", '@import url("https://cdn.example.com/x.css");'),
        ("assets/x.js", 'load("https://cdn.example.com/x.js")'),
        ("assets/x.mjs", 'import x from "https://cdn.example.com/x.mjs"'),
    ],
)
def test_style_sheets_and_scripts_are_read_too(name: str, text: str, tmp_path: Path) -> None:
    (found,) = loads(tmp_path, text, name)
    assert found.startswith(f"{name} loads https://cdn.example.com/")


def test_a_diagram_needs_a_mermaid_of_the_site_itself(tmp_path: Path) -> None:
    assert loads(tmp_path, OWN + DIAGRAM) == []
    assert "has a diagram and no mermaid" in loads(tmp_path, DIAGRAM)[0]
    assert "has a diagram and no mermaid" in loads(tmp_path, OWN.replace("assets", "gone") + DIAGRAM)[0]


def test_the_theme_may_name_the_mermaid_that_it_does_not_load(tmp_path: Path) -> None:
    theme = 'typeof mermaid=="undefined"?load("https://unpkg.com/mermaid@11/dist/mermaid.min.js"):0'
    assert loads(tmp_path, theme, "assets/bundle.js") == []
    assert loads(tmp_path, f"<script>{theme}</script>") != []
