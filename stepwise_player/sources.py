"""Places in the code that emit events: the calls of `emit`, found in the syntax trees of the milestones' packages.

A call names a class of events or one of its factories (`Admit.of`), or something that is named after one:
`batch_event`, `sampled_row`. An event that no call names leads to its class.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[1]
WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
AROUND = 3
"""Lines that are shown before and after."""


@cache
def sources() -> dict[str, list[dict[str, Any]]]:
    """Return the places of each kind of event, in the order of the milestones: file, line, and the lines around."""
    paths = sorted(PACKAGES.glob("m[1-9]_*/**/*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items() if "emit(" in text or "events" in path.name}
    classes = dict[str, list[dict[str, Any]]]()
    for path, tree in trees.items():
        if "events" in path.name:
            for each in tree.body:
                if isinstance(each, ast.ClassDef):
                    classes.setdefault(_kind_of(each.name), [_place(path, texts[path], each.lineno)])
    calls = defaultdict[str, list[dict[str, Any]]](list)
    for path, tree in trees.items():
        names = dict(_imported(tree))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "emit"
                and node.args
            ):
                for name in map(_kind_of, _named(node.args[0], names)):
                    kinds = [kind for kind in classes if f"{name}_".startswith(f"{kind}_")]
                    calls[max(kinds, key=len, default=name)].append(_place(path, texts[path], node.lineno))
    return classes | {kind: places for kind, places in calls.items() if kind in classes}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported name, and what it is called where it comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, each.name) for each in node.names)


def _named(node: ast.expr, names: dict[str, str]) -> Iterator[str]:
    """Yield the names in an expression, as they are called where they come from."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield names.get(each.id, each.id)
        elif isinstance(each, ast.Attribute):
            yield each.attr.strip("_")


def _kind_of(name: str) -> str:
    """Return the kind of a class of events, as `Event.kind_name` does."""
    return WORD_BREAK.sub("_", name).lower()


def _place(path: Path, text: str, number: int) -> dict[str, Any]:
    """Return a line of code as the player shows it."""
    first, lines = max(0, number - 1 - AROUND), text.splitlines()
    return {
        "where": path.relative_to(PACKAGES).as_posix(),
        "line": number,
        "code": "\n".join(lines[first : number + AROUND]),
    }
