"""The pages "One step, all of it": the calls of a recorded step as a tree, with the source of each function in place.

A page has `[step: decode](m4.json)` in a paragraph of its own. The calls are those of the record, the code is today's.
A function has the anchor `decode.Scheduler.schedule`; the first of a page also `Scheduler.schedule`. Properties,
constructors and functions of one statement that call nothing else of the packages are folded into one line, with those
that are shown above.
"""

import ast
import html
import json
import logging
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from docs.code_links import page_of
from docs.highlight import highlight
from docs.record_steps import STEPS, Call, tree
from docs.source_code import ROOT, definitions, read_lines, syntax

LOG = logging.getLogger("mkdocs.hooks.steps")
PLACE = re.compile(r"^\[step: (\w+)\]\((m\d)\.json\)$", re.MULTILINE)
HOLDER = '<div class="step" data-step="{}" data-of="{}"></div>'
HELD = re.compile(HOLDER.format(r"(\w+)", r"(\w+)"))
CALLED = re.compile(r"(?<![\w\"'&])\w+(?=\()")
TREE = """<div class="step" data-search-exclude>
<p>{count}.</p>
<p class="tools"><button value="open">Open all code</button> <button value="close">Close all</button>
<label><input type="checkbox"> Fade what is not new in {milestone}</label></p>
<ul>{calls}</ul>
</div>"""

Key = tuple[str, str]
"""A function: path of the file, and qualified name."""


class Function(NamedTuple):
    """A function of a step, in today's source."""

    code: str
    summary: str
    """The first paragraph of its docstring, as HTML."""
    is_small: bool
    """A property, a constructor, or a single statement."""


def function(path: str, name: str) -> Function | None:
    """Return a function by its file and qualified name; None if today's source has none."""
    lines = definitions(path).get(name)
    if lines is None:
        return None
    code = textwrap.dedent("\n".join(read_lines(path)[lines.first - 1 : lines.last]))
    node = ast.parse(code).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    summary = html.escape((ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " "), quote=False)
    is_single = len(node.body) - bool(summary) == 1 and not hasattr(node.body[-1], "body")
    is_dunder = node.name.startswith("__") and node.name != "__call__"
    is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
    summary = re.sub("`([^`]+)`", r"<code>\1</code>", summary)
    return Function(code, summary, is_single or is_dunder or is_property)


def earlier(path: str, name: str) -> Key | None:
    """Return file and name of what a function replaces: the method of a base class in an earlier package, or the
    function of this name in the file of this name there."""
    package, inside = path.split("/", 1)
    owner, _, method = name.rpartition(".")
    for base_path, base in _ancestors(path, owner):
        if f"{base}.{method}" in definitions(base_path) and not base_path.startswith(package):
            return base_path, f"{base}.{method}"
    for number in range(int(package[1]) - 1, 0, -1):
        for other in ROOT.glob(f"m{number}_*/{inside}"):
            other_path = other.relative_to(ROOT).as_posix()
            if name in definitions(other_path):
                return other_path, name
    return None


def _ancestors(path: str, name: str) -> Iterator[Key]:
    """Yield file and name of the bases of a class, nearest first."""
    module = syntax(path)
    imported = {
        alias.asname or alias.name: (f"{node.module.replace('.', '/')}.py", alias.name)
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                base_path, base_name = imported.get(ast.unparse(base), (path, ast.unparse(base)))
                if (ROOT / base_path).is_file() and base_name in definitions(base_path):
                    yield base_path, base_name
                    yield from _ancestors(base_path, base_name)


def place_steps(markdown: str) -> str:
    """Replace the paragraphs that name a step by places for it; `fill_steps` fills them once the page is HTML."""
    return PLACE.sub(lambda found: HOLDER.format(*found.groups()), markdown)


def fill_steps(page_html: str, top: str) -> tuple[str, set[str]]:
    """Return the page with its steps, and their anchors. `top`: the relative address of the top of the site."""
    page = StepPage(top)
    page_html = HELD.sub(lambda found: StepTree(found[1], found[2], page).as_html(), page_html)
    return page_html, page.anchors


@dataclass
class StepPage:
    """Values that the steps of a page share."""

    top: str
    """The relative address of the top of the site."""
    anchors: set[str] = field(default_factory=set)
    codes: dict[Key, str] = field(default_factory=dict)
    """The anchor at which the page has the code of a function. A later step has a reference to it."""


class StepTree:
    """One step of a milestone as HTML."""

    def __init__(self, step: str, milestone: str, page: StepPage) -> None:
        """Read the record, and give each function its anchor."""
        self.milestone, self.page = milestone, page
        self.calls = tree(json.loads((STEPS / f"{milestone}.json").read_text(encoding="utf-8"))[step])
        self.shown: set[str] = set()
        self.ids: dict[Key, str] = {}
        self.functions: dict[Key, Function | None] = {}
        for path, name in dict.fromkeys(keys_of(self.calls)):
            where = f"{step}.{name}"
            if where in self.ids.values():  # of two packages
                where = f"{step}.{path[:2]}.{name}"
            self.ids[path, name] = where
            self.functions[path, name] = function(path, name)
            if self.functions[path, name] is None:
                LOG.warning(f"docs/steps/{milestone}.json: {path} has no {name}; run: python -m docs.record_steps")

    def as_html(self) -> str:
        """Return the number of functions and the tree."""
        packages = Counter(path[:2] for path, _ in self.ids)
        new = packages.pop(self.milestone, 0)
        count = f"{len(self.ids)} functions in {len({path for path, _ in self.ids})} files"
        if packages:
            count += f"; {new} of them are new in {self.milestone}"
        others = "".join(f", {count} of {package}" for package, count in sorted(packages.items(), reverse=True))
        calls = self._list(self.calls)
        return TREE.format(count=f"<b>{count}</b>{others}", milestone=self.milestone, calls=calls)

    def _list(self, calls: list[Call]) -> str:
        """Return the calls of one function; neighbours that are small or shown above are folded."""
        parts: list[str] = []
        for is_plain, group in groupby(calls, self._is_plain):
            together = list(group)
            items = [self._item(call) for call in together]
            if is_plain and len(items) > 1:
                names = ", ".join(dict.fromkeys(f"<code>{_short(call.name)}</code>" for call in together))
                text = f'<li class="small"><details><summary>{len(items)} calls: {names}</summary><ul>'
                items = [text, *items, "</ul></details></li>"]
            parts += items
        return "".join(parts)

    def _is_plain(self, call: Call) -> bool:
        """Return whether a function is small and calls nothing, or is shown above with all its calls."""
        found = self.functions[call.path, call.name]
        return not self._has_more(call) or (not call.calls and (found is None or found.is_small))

    def _item(self, call: Call) -> str:
        """Return a function with its code and its calls; where it is shown above already, only what it calls anew."""
        where, found = self.ids[call.path, call.name], self.functions[call.path, call.name]
        kind = "new" if call.path.startswith(self.milestone) else "old"
        head = f'<span class="tag {kind}">{call.path[:2]}</span> '
        name = f"<code>{call.name.replace('.', '.<wbr>')}</code>"
        times = f' <span class="times">&times;{call.times}</span>' if call.times > 1 else ""
        if where in self.shown or found is None:
            inner = self._list([each for each in call.calls if self._has_more(each)])
            head = f'<li class="again">{head}<a href="#{where}">{name}</a>{times}'
        else:
            self.shown.add(where)
            plain = "" if call.name in self.page.anchors else f'<a id="{call.name}"></a>'
            self.page.anchors |= {where, call.name}
            summary = f"<summary>{head}{name}{times}<small>{found.summary}</small></summary>"
            head = f'<li id="{where}">{plain}<details class="{kind}"{self._source(call, summary, found)}</details>'
            inner = self._list(call.calls)
        return f"{head}<ul>{inner}</ul></li>" if inner else f"{head}</li>"

    def _has_more(self, call: Call) -> bool:
        return any(self.ids[key] not in self.shown for key in keys_of([call]))

    def _source(self, call: Call, summary: str, found: Function) -> str:
        """Return a function's line, its place, and its code with links from its calls to those of the tree.

        Code that the page has already is referred to: the page's script shows it here, too.
        """
        key = call.path, call.name
        place = self._link("", *key)
        before = earlier(*key) if call.path.startswith(self.milestone) else None
        if before is not None:
            place += self._link("; before: ", *before)
        text = f'>{summary}<p class="place">{place}</p>'
        if key in self.page.codes:
            return f' data-code="{self.page.codes[key]}"{text}'
        self.page.codes[key] = self.ids[key]
        ids = {_short(each.name): self.ids[each.path, each.name] for each in call.calls}

        def link(word: re.Match[str]) -> str:
            return f'<a href="#{ids[word[0]]}">{word[0]}</a>' if word[0] in ids else word[0]

        code = "\n".join(CALLED.sub(link, line) for line in highlight(found.code, "python"))
        return f'{text}<pre class="highlight"><code>{code}</code></pre>'

    def _link(self, text: str, path: str, name: str) -> str:
        first = definitions(path)[name].first
        return f'{text}<a href="{self.page.top}{page_of(path, first)}">{path}:{first}</a>'


def keys_of(calls: list[Call]) -> Iterator[Key]:
    """Yield file and name of all calls of a tree, from the top."""
    for call in calls:
        yield call.path, call.name
        yield from keys_of(call.calls)


def _short(name: str) -> str:
    """Return the name by which a function is called: its own, or that of the class for a constructor."""
    owner, _, last = name.rpartition(".")
    return owner.rpartition(".")[2] if last == "__init__" else last
