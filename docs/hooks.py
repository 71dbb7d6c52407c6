"""What MkDocs does not do by itself: show the notebooks, which lie beside docs/, and follow links to and from them.

Links are written as GitHub needs them: a page links to `../notebooks/x.ipynb`, a notebook to `../docs/x.md`. On the
site both lie in one tree.
"""

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger("mkdocs.hooks.notebooks")


@event_priority(100)  # before mkdocs-jupyter looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every notebook to the site's files."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File(f"notebooks/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links from a page to notebooks, as the site needs them; MkDocs checks them afterwards."""
    return re.sub(r"\]\(\.\./(notebooks/[\w.-]+\.ipynb)", r"](\1", markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Links from a notebook to pages, as the site needs them; a link to nothing fails a strict build."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html

    def on_site(link: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{link[1]}.md")
        if target is None:
            LOG.warning(f"{page.file.src_uri} links to docs/{link[1]}.md, which does not exist")
            return link[0]
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(r'href="\.\./docs/([\w/-]+)\.md', on_site, html)
