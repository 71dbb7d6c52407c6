"""The look of the site's pages: pictures for two schemes, notebooks without Jupyter's styles, examples of events.

A hook of MkDocs after `hooks.py`, which is about links. The rules for all of it are in `assets/look.css`.
"""

import html
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

PICTURE = re.compile(r'<img ([^>]*?)src="((?:\.\./)*)(assets/\w+\.svg)"([^>]*?) ?/?>')
DIAGRAM = re.compile(r'<pre class="mermaid">.*?</pre>', re.DOTALL)
CODE = re.compile(r'<div class="highlight[^>]*><pre[^>]*>(?:<span></span>)?(.*?)\s*</pre>\s*</div>', re.DOTALL)
"""Code of a cell, or shown by one."""
COPY_BUTTON = re.compile(
    r'<div class="zeroclipboard-container">.*?</clipboard-copy>\s*</div>'
    r'|<div[^>]* class="clipboard-copy-txt"[^>]*>.*?</div>',
    re.DOTALL,
)
"""Button and text of mkdocs-jupyter; the theme has a button of its own."""
TERMINAL = {
    "#800000": "var(--red)", "#008000": "var(--green)", "#808000": "var(--yellow)", "#000080": "var(--blue)",
    "#800080": "var(--magenta)", "#008080": "var(--cyan)", "#000000": "inherit",
}  # fmt: skip
"""Colors of rich and those of `look.css`."""
MONOKAI = {"#66D9EF": "k", "#A6E22E": "nf", "#E6DB74": "s", "#AE81FF": "mi", "#FF4689": "o", "#959077": "c1"}
"""Colors of source that a cell shows, and the kind of token."""


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Change a page's HTML, and name the page by its heading: the navigation's *Lesson* is no name for a tab."""
    source = page.file.src_uri
    heading = re.search(r"<h1[^>]*>(.*?)<(?:a|/h1)", content, re.DOTALL)
    if heading and source != "index.md":
        kind = " (notebook)" if source.endswith(".ipynb") else ""
        page.meta.setdefault("title", re.sub(r"<[^>]*>", "", heading[1]) + kind)
    content = DIAGRAM.sub(r'<div class="diagram">\g<0></div>', content)
    if source.endswith(".ipynb"):
        content = notebook(content)
    elif source == "rosetta.md":
        content = f'<div class="sticky-names">{whole_names(content)}</div>'
    elif source.startswith("api/"):
        content = reference(with_examples(content) if source.startswith("api/events") else content)
        if source != "api/face.md":  # elsewhere, hundreds of fields and methods
            for module in (module for title in page.toc for module in title.children):
                for part in module.children:
                    part.children = []
    return PICTURE.sub(in_both_schemes, content)


def in_both_schemes(image: re.Match[str]) -> str:
    """Return two images of one file, of which the theme shows the one for its scheme; see `scheme.py`."""
    before, up, path, after = image.groups()
    size = re.search(r'width="\d+" height="\d+"', (ROOT / "docs" / path).read_text(encoding="utf-8"))
    rest = f'{size[0] if size else ""} loading="lazy" {before}{after}'.strip()
    return "".join(f'<img src="{up}{path}#only-{scheme}" {rest}>' for scheme in ("light", "dark"))


def in_colors_of_the_page(content: str) -> str:
    """Return outputs of a notebook without colors that were made for one background."""
    content = re.sub(r"; text-decoration-color: #\w{6}", "", content)
    content = re.sub(r'<span style="color: (#[0-9A-F]{6})">(.*?)</span>', _token, content, flags=re.DOTALL)
    plain = r'style="color: (#\w{6})(?![^"]*background)'
    return re.sub(plain, lambda own: f'style="color: {TERMINAL.get(own[1], own[1])}', content)


def _token(span: re.Match[str]) -> str:
    """Return a token of a listing, with the class that the theme colors."""
    return f'<span class="{MONOKAI[span[1]]}">{span[2]}</span>' if span[1] in MONOKAI else span[2]


def notebook(content: str) -> str:
    """Return nbconvert's page without its styles and scripts (some load from a CDN), its code cells like other code."""
    body = content[content.index('<div class="jupyter-wrapper">') : content.rindex("<style")]
    body = COPY_BUTTON.sub("", body).replace('class="anchor-link"', 'class="headerlink"')
    return in_colors_of_the_page(CODE.sub(r'<div class="highlight"><pre><code>\1\n</code></pre></div>', body))


def whole_names(content: str) -> str:
    """Let names in tables break behind a dot or a slash, where CSS forbids any other break."""
    return re.sub(
        r"<code>[^<]*</code>", lambda name: re.sub(r"(?<=\w)([./])(?=\w)(?!py\b)", r"\1<wbr>", name[0]), content
    )


def reference(content: str) -> str:
    """Return mkdocstrings' page without empty lines, and signatures without anchors of lines and marks of names."""
    content = re.sub(r'<a id="__codelineno-0-[^>]*></a>', "", content)
    content = re.sub(r'<span class="[nw]">([^<]*)</span>', r"\1", content)
    parts = re.split(r"(<pre.*?</pre>)", content, flags=re.DOTALL)
    return "".join(part if part.startswith("<pre") else re.sub(r"\s*\n\s*", "\n", part) for part in parts)


def with_examples(content: str) -> str:
    """Add to the section of each event its sentence, as the console prints it."""
    sentences = event_sentences()

    def with_example(section: re.Match[str]) -> str:
        sentence = sentences.get(section[1])
        return section[0] + (f'<p class="event-example">{html.escape(sentence)}</p>' if sentence else "")

    return re.sub(r'<h3 id="([\w.]+)".*?</p>', with_example, content, flags=re.DOTALL)


def event_sentences() -> dict[str, str]:
    """Return an example of every event's sentence, by the full name of its class."""
    sys.path.insert(0, str(ROOT))  # MkDocs takes back what a hook adds while it is loaded
    from tests.events.milestones import MILESTONES, examples  # here: these pages alone need the engines

    found: dict[str, str] = {}
    for milestone in MILESTONES:
        for event in examples(milestone):
            found.setdefault(f"{type(event).__module__}.{type(event).__qualname__}", event.explain())
    return found
