"""The page: style, script, traces and places in the code, in one HTML file.

The modules of `static/` are joined to one: a page that is opened as a file may not load others. Traces are gzipped, in
base64.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from stepwise_player.sources import sources

STATIC = Path(__file__).parent / "static"
MODULES = ("requests", "state", "trace", "dom", "lanes", "step", "pages", "tree", "panel", "player", "load")
"""Each one after those that it imports."""
IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.M)
GZIP = b"\x1f\x8b"
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.M)
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Stepwise: {title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 92rem; padding: .5rem 1rem; background: light-dark(#fff, #14181d); }}
{style}</style>
</head>
<body>
<main id="player"></main>
<script type="module">
{script}
const root = document.getElementById("player"), runs = {runs}, links = {links};
try {{
  for (const run of runs) run.text = await unpacked(run.packed);
  mount(root, runs, {{links}});
}} catch (error) {{ fail(root, error); }}
</script>
</body>
</html>
"""


def bundle() -> str:
    """Return all modules as one script, each in a function of its own, and the functions that a page needs of them."""
    texts = [_as_function(name, (STATIC / f"{name}.js").read_text(encoding="utf-8")) for name in MODULES]
    return "\n".join([*texts, "const {mount} = in_player, {fail, unpacked} = in_load;"])


def _as_function(name: str, text: str) -> str:
    """Return a module as a function that returns what it exports."""
    exported = ", ".join(match[2] for match in EXPORT.finditer(text))
    body = EXPORT.sub(r"\1", IMPORT.sub(r"const \1 = in_\2;", text))
    return f"const in_{name} = (() => {{\n{body}return {{{exported}}};\n}})();"


def page(runs: Sequence[tuple[str, bytes]]) -> str:
    """Return a page that shows one run, or two side by side: the name and the trace of each (JSONL, may be gzipped)."""
    return TEMPLATE.format(
        title=html.escape(" and ".join(name for name, _ in runs)),
        style=(STATIC / "player.css").read_text(encoding="utf-8"),
        script=bundle(),
        runs=_in_script([packed(name, data) for name, data in runs]),
        links=_in_script(sources()),
    )


def packed(name: str, data: bytes) -> dict[str, str]:
    """Return a run as the player's modules take it: gzipped, in base64."""
    data = data if data.startswith(GZIP) else gzip.compress(data)
    return {"name": name, "packed": base64.b64encode(data).decode()}


def _in_script(value: object) -> str:
    """Return a value as JSON that ends no script element."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/").replace("<!--", "<\\!--")
