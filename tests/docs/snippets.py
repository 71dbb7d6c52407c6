"""Find the snippets that a reader copies: Python and commands of the pages, and examples of the public docstrings.

A command is a line of a fenced block, or a piece of code in a sentence that begins with a program. What `&&` connects
are several commands. An example in a docstring is an indented paragraph that begins with a statement.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)``` ?(\w*).*\n((?s:.*?))^\1```$", re.M)
IN_A_SENTENCE = re.compile(r"`((?:python|pytest|pip|curl|mkdocs|jupyter)\s(?:[^`\n]|\n(?!\n))+)`")
INDENTED = re.compile(r"^ {4}.*\n(?:\n* {4}.*\n)*", re.M)
STATEMENT = re.compile(r" {4}(from|import|with|async|engine)\b")


class Snippet(NamedTuple):
    """A piece of Python, or one command in one line."""

    page: str
    line: int
    code: str

    @property
    def name(self) -> str:
        """Its page and its first line: the key of the lists in `test_snippets.py`."""
        return f"{self.page}: {self.code.splitlines()[0]}"


def fenced(page: str, text: str, *languages: str) -> Iterator[Snippet]:
    """Yield the fenced blocks in these languages. A block of code that is included from a file is no snippet."""
    for block in FENCED.finditer(text):
        if block[2] in languages and "--8<--" not in block[3]:
            yield Snippet(page, line_at(text, block.start(3)), dedent(block[3]))


def commands(page: str, text: str) -> Iterator[Snippet]:
    """Yield the commands of a page: those of its blocks, then those of its sentences."""
    for block in fenced(page, text, "bash", "sh", "console"):
        for line in re.finditer(r"(?:.*\\\n)*.+", block.code):
            if not line[0].startswith("#"):
                yield from connected(page, block.line + line_at(block.code, line.start()) - 1, line[0])
    sentences = FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    for code in IN_A_SENTENCE.finditer(sentences):
        yield from connected(page, line_at(sentences, code.start()), code[1])


def connected(page: str, line: int, code: str) -> Iterator[Snippet]:
    """Yield the commands between `&&`, each in one line and without a comment."""
    for command in re.sub(r"\s+# .*|\s*\\?\n\s*", " ", code).strip().split(" && "):
        yield Snippet(page, line, command)


def examples(page: str, source: str) -> Iterator[Snippet]:
    """Yield the examples in the docstrings of a Python file: of the module, its classes, functions and fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                text = re.sub(f"^ {{{node.col_offset}}}", "", text, flags=re.M) + "\n"
                for block in INDENTED.finditer(text):
                    if STATEMENT.match(block[0]):
                        yield Snippet(page, node.lineno + line_at(text, block.start()) - 1, dedent(block[0]))


def public_files() -> list[Path]:
    """Return the files of the public face: the packages, and the modules of the classes and functions they export."""
    packages = [importlib.import_module(path.parent.name) for path in sorted(ROOT.glob("m[1-9]_*/__init__.py"))]
    names = [getattr(package, name) for package in packages for name in package.__all__]
    modules = {value.__module__ for value in names if inspect.isclass(value) or inspect.isfunction(value)}
    files = [sys.modules[name].__file__ for name in modules | {package.__name__ for package in packages}]
    return sorted(Path(file) for file in files if file)


def line_at(text: str, place: int) -> int:
    """Return the number of the line of a place in a text."""
    return text.count("\n", 0, place) + 1
