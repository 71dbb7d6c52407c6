"""The weight of each page of a built site, and its limit.

`python -m tests.docs.page_weights SITE` prints a table in kB (1,000 bytes, not compressed) and fails if a page is over
its limit. A page weighs its HTML, its pictures (each file once, also those further down) and its own scripts. Not
counted is what pages share, so that a browser loads it once: styles and scripts of the theme, and libraries in
`assets/vendor`. Not counted either are traces: a player loads them once it is in sight.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

LIMITS = {r"(m\d\w*/)?index\.html": 500, r"api/\w+/index\.html": 600, r"notebooks/\w+/index\.html": 1000}
"""The most that a page may weigh in kB, by its path: landing page and lessons, reference, notebooks."""
SHARED = ("assets/javascripts/", "assets/vendor/")


class Loads(HTMLParser):
    """Collects the addresses of pictures and scripts of a page, each once and without its fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = (dict(attrs).get("src") or "").partition("#")[0]
        if tag in ("img", "script") and address and not address.startswith("data:") and "//" not in address:
            self.found[address] = tag


class Weight(NamedTuple):
    """Bytes that a page loads."""

    page: str
    html: int
    pictures: int
    scripts: int

    @property
    def total(self) -> int:
        return self.html + self.pictures + self.scripts

    @property
    def limit(self) -> int | None:
        """The most that it may be, in kB."""
        return next((limit for form, limit in LIMITS.items() if re.fullmatch(form, self.page)), None)

    @property
    def is_too_much(self) -> bool:
        return self.limit is not None and self.total > 1000 * self.limit


def weigh(site: Path, path: Path) -> Weight:
    """The weight of one page of `site`."""
    text, loads = path.read_text(encoding="utf-8"), Loads()
    loads.feed(text)
    files = {(path.parent / address).resolve(): tag for address, tag in loads.found.items()}
    own = {file: tag for file, tag in files.items() if not is_shared(site.resolve(), file)}
    pictures, scripts = (
        sum(file.stat().st_size for file, tag in own.items() if tag == kind) for kind in ("img", "script")
    )
    return Weight(path.relative_to(site).as_posix(), len(text.encode()), pictures, scripts)


def is_shared(site: Path, file: Path) -> bool:
    """Whether a file of the site belongs to many pages."""
    return file.relative_to(site).as_posix().startswith(SHARED)


def table(weights: list[Weight]) -> str:
    """The weights in kB, the heaviest page first."""
    rows = [f"{'page':<44}{'HTML':>8}{'pictures':>10}{'scripts':>9}{'total':>8}{'limit':>7}"]
    for weight in sorted(weights, key=lambda weight: -weight.total):
        parts = f"{weight.html / 1e3:>8,.0f}{weight.pictures / 1e3:>10,.0f}{weight.scripts / 1e3:>9,.0f}"
        mark = "  TOO MUCH" if weight.is_too_much else ""
        rows.append(f"{weight.page:<44}{parts}{weight.total / 1e3:>8,.0f}{weight.limit or '':>7}{mark}")
    return "\n".join(rows)


def main() -> int:
    site = Path(sys.argv[1])
    weights = [weigh(site, path) for path in sorted(site.rglob("index.html"))]
    print(table(weights))
    return int(not weights or any(weight.is_too_much for weight in weights))


if __name__ == "__main__":
    sys.exit(main())
