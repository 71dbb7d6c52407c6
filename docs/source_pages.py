"""A page of the site for each source file of the packages: highlighted, light, with an anchor for each line (`#L45`).

They are no part of the navigation and of the search. Imports lead to the pages of the modules that they name, and the
head of a page to the files of the same name in the other packages: same name, same role.
"""

import html
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from docs.code_links import page_of
from docs.highlight import highlight
from docs.source_code import read_lines, source_files

MODULE = re.compile(r'<span class="nn">(m\d_[\w.]+)</span>')
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<link rel="icon" href="data:,">
<title>{path} - Stepwise</title>
<link rel="stylesheet" href="{top}assets/source.css">
<script>
try {{  // the colours that the reader chose on the site
    const chosen = JSON.parse(localStorage.getItem(new URL("{top}.", location).pathname + ".__palette"))
    document.documentElement.dataset.scheme = chosen.color.scheme
}} catch {{}}
</script>
</head>
<body>
<header>
<p><a href="{top}">Stepwise</a> / {lesson} / <b>{inside}</b></p>
{same}</header>
<main><pre><code>{code}</code></pre></main>
<script>
onclick = event => {{  // on the number of a line: show its address
    if (event.target.matches("code > span") && event.offsetX < 60) location.hash = event.target.id
}}
</script>
</body>
</html>
"""


def source_pages() -> Iterator[tuple[str, str]]:
    """Yield the address and the HTML of each page."""
    paths = source_files()
    for path in paths:
        yield page_of(path), source_page(path, paths)


def source_page(path: str, paths: list[str]) -> str:
    """Return the page of a file. `paths`: all files that have a page."""
    address = page_of(path)
    top = "../" * address.count("/")
    package, inside = path.split("/", 1)
    lines = highlight("\n".join(read_lines(path)).rstrip("\n"), "python" if path.endswith(".py") else "cpp")
    code = "\n".join(f'<span id="L{n}">{line}</span>' for n, line in enumerate(lines, 1))
    name = PurePosixPath(path).name
    same = [other for other in paths if PurePosixPath(other).name == name and other != path and name != "__init__.py"]
    links = ", ".join(f'<a href="{top}{page_of(other)}">{other.removesuffix("/" + name)}</a>' for other in same)
    return PAGE.format(
        path=path,
        top=top,
        lesson=f'<a href="{top}{package}/">{package}</a>',
        inside=html.escape(inside),
        same=f"<p>{name} also in {links}</p>\n" if same else "",
        code=MODULE.sub(lambda found: _link_module(found, top, paths), code),
    )


def _link_module(found: re.Match[str], top: str, paths: list[str]) -> str:
    """Return the name of a module in an import, as a link to its page if there is one."""
    stem = found[1].replace(".", "/")
    path = next((each for each in (f"{stem}.py", f"{stem}/__init__.py") if each in paths), None)
    return f'<a href="{top}{page_of(path)}">{found[1]}</a>' if path else found[0]
