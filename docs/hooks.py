"""Additions to MkDocs: source code, links that leave docs/ (to notebooks, measurements), and a site without network.

Each source file of the packages has a page (`source_pages.py`), to which links to files lead (`code_links.py`).

Diagrams are drawn by the copy of mermaid in `assets/vendor`. `python -m tests.docs.foreign_hosts` checks a built site.

Links are written as GitHub needs them: a page links to `../notebooks/x.ipynb`, a notebook to `../docs/x.md`. On the
site both lie in one tree.
"""

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent.parent))  # for all hooks: MkDocs looks for no modules in the checkout

os.environ["STEPWISE_PROGRESS"] = ""  # a build of the site is no learner: nothing is recorded as solved

from docs.code_links import link_html, link_source
from docs.source_pages import source_pages
from docs.step_pages import fill_steps, place_steps

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger("mkdocs.hooks.notebooks")
BESIDE = (
    ("notebooks", "*.ipynb"),
    ("notebooks", "journey.py"),
    ("starters", "*.py"),
    ("benchmarks/results", "*.json"),
    ("benchmarks/results", "*.md"),
)
"""Folders beside docs/, and the pattern of those of their files that the site contains, too."""

SCRIPTS = {
    'class="mermaid"': "assets/vendor/mermaid-11.17.2/mermaid.min.js",
    'class="step"': "assets/steps.js",
}
"""Scripts that only pages with such an element load. Mermaid is `dist/mermaid.min.js` of the npm package; with it the
theme does not load its own copy from unpkg.com."""


@event_priority(100)  # before mkdocs-jupyter looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands beside docs/ to the site's files. Tables of measurements become pages; only links lead there.

    Python files of docs/ itself are left out of the site (`exclude_docs`); one that is added here is not.
    """
    for folder, pattern in BESIDE:
        for path in sorted((ROOT / folder).glob(pattern)):
            file = File(f"{folder}/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls)
            if path.suffix in (".md", ".py"):
                file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)
    for address, text in source_pages():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links that leave docs/ for the site; MkDocs checks them afterwards. Remove text for GitHub only."""
    markdown = re.sub(r"<!-- on GitHub only -->.*?<!-- end -->\n", "", markdown, flags=re.DOTALL)
    markdown = place_steps(link_source(markdown, page.file.src_uri))
    beside = "|".join(re.escape(folder) for folder in dict(BESIDE))
    return re.sub(rf"\]\(\.\./((?:{beside})/[\w.-]+\.\w+)", r"](\1", markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Link names and titles of code, and show steps. Rewrite links from a notebook; wrong ones fail a strict build."""
    top = get_relative_url(".", page.url).rstrip("/") + "/"
    html, anchors = fill_steps(link_html(html, page.file.src_uri, top), top)
    if anchors:
        page.present_anchor_ids = anchors | (page.present_anchor_ids or set())  # MkDocs checks links to them
    if not page.file.src_uri.startswith("notebooks/"):
        return html

    def on_site(link: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{link[1]}.md")
        if target is None:
            LOG.warning(f"{page.file.src_uri} links to docs/{link[1]}.md, which does not exist")
            return link[0]
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(r'href="\.\./docs/([\w/-]+)\.md', on_site, html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load the script of a page with a diagram, or with a step; `defer`: once the page is read, and before the theme
    draws."""
    for mark, script in SCRIPTS.items():
        if mark in output:
            tag = f'<script src="{get_relative_url(script, page.url)}" defer></script>'
            output = output.replace("</head>", f"{tag}\n</head>", 1)
    return output
