"""The trace player on the site: a paragraph of a page that is only a link becomes a player.

    [player: What to look at.](assets/traces/m4.jsonl.gz)
    [player: What happens in the fifth step.](assets/traces/m4.jsonl.gz#5)
    [player: What differs.](assets/traces/shared.jsonl.gz "cached") [beside](assets/traces/alone.jsonl.gz "without")

Two links are two runs side by side, with their titles as names. `[player: drop]()` is a place for traces of the reader.
A player loads its traces once it is in sight. The modules of `stepwise_player` are files of the site.
"""

import html
import json
import logging
import re
from typing import Any

from stepwise_player.page import STATIC
from stepwise_player.sources import sources

LOG = logging.getLogger("mkdocs.hooks.player")
FOLDER = "assets/player"
TRACE = r'\]\(([\w./]+\.jsonl\.gz)(?:#(\d+))?(?: "([^"]*)")?\)'
PLAYER = re.compile(rf"^\[player: ([^\]]+){TRACE}(?: \[[^\]]+{TRACE})?$", re.M)
DROP = "[player: drop]()"
ZONE = """<div class="stepwise-drop" data-base="{base}">Drop one trace here, or two, or choose them: </div>
<div></div>"""
FIGURE = """<figure class="stepwise-run" markdown="1">
<figcaption markdown="span">{caption}</figcaption>
<div class="stepwise-player" data-runs="{runs}" data-base="{base}" data-step="{step}"></div>
</figure>"""
HEAD = """<link rel="stylesheet" href="{folder}/player.css">
<script type="module" src="{folder}/site.js"></script>
</head>"""


def on_files(files: Any, config: Any) -> Any:
    """Add the player's modules, its style, and the places in the code that emit events."""
    from mkdocs.structure.files import File

    for path in sorted(STATIC.iterdir()):
        files.append(File.generated(config, f"{FOLDER}/{path.name}", abs_src_path=str(path)))
    places = {kind: [{**place, "code": ""} for place in found] for kind, found in sources().items()}
    files.append(File.generated(config, f"{FOLDER}/links.js", content=f"export const links = {json.dumps(places)};\n"))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Put an element for each player; `site.js` fills it."""

    def element(found: re.Match[str]) -> str:
        caption, *traces = found.groups()
        given = zip(traces[::3], traces[2::3], strict=True)
        runs = html.escape(
            json.dumps([{"name": name or caption, "url": url_of(trace)} for trace, name in given if trace])
        )
        return FIGURE.format(caption=caption, base=base, runs=runs, step=traces[1] or 1)

    def url_of(trace: str) -> str:
        file = files.get_file_from_path(trace)
        if file is None:
            LOG.warning(f"{page.file.src_uri} shows {trace}, which does not exist")
            return trace
        return file.url_relative_to(page.file)

    base = top_of(page)
    return PLAYER.sub(element, markdown).replace(DROP, ZONE.format(base=base))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the player on pages that have one."""
    if 'class="stepwise-player"' not in output and 'class="stepwise-drop"' not in output:
        return output
    return output.replace("</head>", HEAD.format(folder=f"{top_of(page)}{FOLDER}"), 1)


def top_of(page: Any) -> str:
    """Return the address of the site's top, relative to a page."""
    return "../" * page.url.count("/") or "./"
