"""Additions to MkDocs: links that leave docs/ (to notebooks, source files, measurements), and a site without network.

Diagrams are drawn by the copy of mermaid in `assets/vendor`. The scripts that nbconvert adds to pages of notebooks, and
that load something from a CDN, are removed; none is needed: formulas are plain text here.
`python -m tests.docs.foreign_hosts` checks a built site.

Links are written as GitHub needs them: a page links to `../notebooks/x.ipynb`, a notebook to `../docs/x.md`. On the
site both lie in one tree; a link to a source file leads to its page of the reference.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger("mkdocs.hooks.notebooks")
BESIDE = (
    ("notebooks", "*.ipynb"),
    ("notebooks", "journey.py"),
    ("benchmarks/results", "*.json"),
    ("benchmarks/results", "*.md"),
    ("m3_paged_attention/attention/native", "*.cpp"),
    ("m3_paged_attention/attention/native", "*.h"),
)
"""Folders beside docs/, and the pattern of those of their files that the site contains, too."""
CLASSES = {"llm_engine": "llm_engine.LLMEngine", "request_stream": "request_stream.RequestStream"}
"""Modules that the reference shows class by class, and the class to which a link to the file leads."""

MERMAID = "assets/vendor/mermaid-11.17.2/mermaid.min.js"
"""`dist/mermaid.min.js` of the npm package. With it the theme does not load its own copy from unpkg.com."""
CDN_SCRIPT = re.compile(
    r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->"
    r"|<script\b[^>]*>(?:(?!</script>).)*https://cdnjs\.cloudflare\.com/.*?</script>",
    re.DOTALL,
)
"""A script on the page of a notebook that loads something from a CDN."""


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
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links that leave docs/ for the site; MkDocs checks them afterwards. Remove text for GitHub only."""

    def to_reference(link: re.Match[str]) -> str:
        module = link[3].replace("/", ".")
        return f"[{link[1]}][{link[2]}.{CLASSES.get(module, module)}]"

    markdown = re.sub(r"<!-- on GitHub only -->.*?<!-- end -->\n", "", markdown, flags=re.DOTALL)
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./(m\d_\w+)/([\w/]+)\.py\)", to_reference, markdown)
    beside = "|".join(re.escape(folder) for folder in dict(BESIDE))
    return re.sub(rf"\]\(\.\./((?:{beside})/[\w.-]+\.\w+)", r"](\1", markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Rewrite links from a notebook to pages for the site; a link without a target fails a strict build."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html

    def on_site(link: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{link[1]}.md")
        if target is None:
            LOG.warning(f"{page.file.src_uri} links to docs/{link[1]}.md, which does not exist")
            return link[0]
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(r'href="\.\./docs/([\w/-]+)\.md', on_site, CDN_SCRIPT.sub("", html))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load mermaid on pages with a diagram; `defer`: once the page is read, and before the theme draws."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{get_relative_url(MERMAID, page.url)}" defer></script>'
    return output.replace("</head>", f"{script}\n</head>", 1)
