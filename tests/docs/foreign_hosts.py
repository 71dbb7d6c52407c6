"""What a built site loads from other hosts: nothing, or it does not work without the internet.

`python -m tests.docs.foreign_hosts SITE` prints each address on a foreign host that a page, a style sheet or a script
of the site loads, and fails if there is one. A link that a reader may follow is no load. In a script each quoted
address counts as one, but for those in `NOT_LOADED`.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FOREIGN = r"(?:https?:)?//[\w-]+(?:\.[\w-]+)+[^\s\"'`)\\]*"
ADDRESS = re.compile(rf"\s*{FOREIGN}", re.IGNORECASE)
IN_CSS = re.compile(rf"(?:@import\s*|url\(\s*)[\"']?({FOREIGN})", re.IGNORECASE)
IN_SCRIPT = re.compile(rf"[\"'`]({FOREIGN})")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
LOADED = {
    "src": "*", "srcset": "*", "poster": "*", "background": "*", "data": "object", "xlink:href": "image use",
    "href": "link image use base",
}  # fmt: skip
"""Attributes whose address is loaded, and of which elements."""
LINKED = {"alternate", "author", "canonical", "edit", "help", "license", "next", "prev", "search"}
"""Values of `rel` that load nothing."""
NOT_LOADED = (
    "http://www.w3.org/",  # names of XML vocabularies
    "https://unpkg.com/resize-observer-polyfill",  # for browsers from before 2020
    "https://api.github.com/",  # counts stars, where mkdocs.yml names a repository
)
THEME_MERMAID = "https://unpkg.com/mermaid@"
"""In the theme's script; not loaded where `mermaid` is there already, which `foreign_loads` checks."""


class Loads(HTMLParser):
    """Collects the foreign addresses that one page loads, and whether it has diagrams and their renderer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts: list[str] = []
        self.has_diagram = False
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._inside = tag if tag in ("script", "style") else ""
        self.has_diagram |= "mermaid" in given.get("class", "").split()
        if tag == "script" and "src" in given:
            self.scripts.append(given["src"])
        if tag == "link" and set(given.get("rel", "").lower().split()) <= LINKED:
            return
        for name, value in given.items():
            if name == "style":
                self.found += IN_CSS.findall(value)
            elif name in LOADED and (LOADED[name] == "*" or tag in LOADED[name].split()):
                parts = value.split(",") if name == "srcset" else [value]
                self.found += [part.strip() for part in parts if ADDRESS.match(part)]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.found += IN_CSS.findall(data)
        elif self._inside == "script":
            self.found += in_script(data)


def in_script(text: str) -> list[str]:
    """The addresses in a script that it may load."""
    return [found for found in IN_SCRIPT.findall(COMMENT.sub("", text)) if not found.startswith(NOT_LOADED)]


def foreign_loads(site: Path) -> Iterator[str]:
    """A line for each foreign address that a file of `site` loads."""
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if path.suffix == ".html":
            page = Loads()
            page.feed(path.read_text(encoding="utf-8"))
            yield from (f"{name} loads {found}" for found in page.found)
            if page.has_diagram and not any(is_mermaid(path, script) for script in page.scripts):
                yield f"{name} has a diagram and no mermaid.min.js of this site: the theme loads {THEME_MERMAID}..."
        elif path.suffix == ".css":
            found_here = IN_CSS.findall(COMMENT.sub("", path.read_text(encoding="utf-8")))
            yield from (f"{name} loads {found}" for found in found_here)
        elif path.suffix in (".js", ".mjs"):
            found_here = in_script(path.read_text(encoding="utf-8"))
            yield from (f"{name} loads {found}" for found in found_here if not found.startswith(THEME_MERMAID))


def is_mermaid(page: Path, script: str) -> bool:
    """Is this script of a page the site's own mermaid, and is it there?"""
    return script.endswith("/mermaid.min.js") and "//" not in script and (page.parent / script).is_file()


def main() -> int:
    site = Path(sys.argv[1])
    if not (site / "index.html").is_file():
        sys.exit(f"{site} is not a built site: it has no index.html")
    found = list(foreign_loads(site))
    print("\n".join(found) or "nothing is loaded from foreign hosts")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
