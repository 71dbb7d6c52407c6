"""The player on a page of the site: its links lead to the top of the site, and its caption stands above."""

import re
from types import SimpleNamespace
from typing import Any
from urllib.parse import urljoin

import pytest

from docs.player import DROP, on_page_markdown

FILES: Any = SimpleNamespace(
    get_file_from_path=lambda path: SimpleNamespace(url_relative_to=lambda page: f"../{path}"),
)


def page_of(url: str, markdown: str) -> str:
    """A page at an address, with its players."""
    page: Any = SimpleNamespace(url=url, file=SimpleNamespace(src_uri="m4.md"))
    return on_page_markdown(markdown, page, FILES)


@pytest.mark.parametrize("url", ["", "m4_radix_cache/", "steps/m4/"])
@pytest.mark.parametrize("markdown", ["[player: Look.](assets/traces/m4.jsonl.gz#5)", DROP])
def test_code_and_steps_are_at_the_top_of_the_site(url: str, markdown: str) -> None:
    (base,) = re.findall(r'data-base="(.*?)"', page_of(url, markdown))
    assert urljoin(f"https://site.test/{url}", f"{base}code/m4.html") == "https://site.test/code/m4.html"


def test_what_to_look_at_stands_above_the_player() -> None:
    page = page_of("m4_radix_cache/", "[player: Look.](assets/traces/m4.jsonl.gz#5)")
    assert page.index(">Look.<") < page.index('data-runs="') and 'data-step="5"' in page
