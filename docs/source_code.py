"""Find what a source file of the packages defines, by name: functions, methods, classes, constants, fields.

Python files are parsed. In C++ files a definition begins at the left margin, or in a struct four columns further.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CPP_NAME = re.compile(r"(?:template <[^>]*> )?(?!#|//|\})[^({=;]*?\b(\w+)(?:<[^<>]*>)?\s*(?:[({=]|:(?!:)|$)")
CPP_NO_NAMES = {"for", "if", "while", "switch", "return", "namespace", "template", "public", "private", "EXPORTS"}
CPP_NO_CODE = re.compile(r"//.*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'")


class Lines(NamedTuple):
    """First and last line of a piece of a file, counted from 1."""

    first: int
    last: int


def source_files() -> list[str]:
    """Return the paths of all source files of the packages, from the top of the checkout."""
    found = [path for end in ("py", "h", "cpp") for path in ROOT.glob(f"m[1-9]_*/**/*.{end}") if path.stat().st_size]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read_lines(path: str) -> list[str]:
    """Return the lines of a file, without line ends."""
    return (ROOT / path).read_text(encoding="utf-8").split("\n")


def syntax(path: str) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return _parsed(path, (ROOT / path).stat().st_mtime_ns)[0]


def definitions(path: str) -> dict[str, Lines]:
    """Return the lines of everything that a file defines, by name: `f`, `f.inner`, `Class`, `Class.method`, `LIMIT`.

    They begin with decorators, or with comments above a definition in C++. A constant or field includes its docstring.
    """
    return _parsed(path, (ROOT / path).stat().st_mtime_ns)[1]


@cache
def _parsed(path: str, _: int) -> tuple[ast.Module, dict[str, Lines]]:
    found: dict[str, Lines] = {}
    lines = read_lines(path)
    if not path.endswith(".py"):
        _add_cpp(lines, Lines(1, len(lines)), "", found)
        return ast.Module([], []), found
    module = ast.parse("\n".join(lines))
    _add_python(module.body, "", found)
    return module, found


def _add_python(nodes: Iterable[ast.AST], prefix: str, found: dict[str, Lines]) -> None:
    nodes = list(nodes)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        end = getattr(node, "end_lineno", 0)
        if isinstance(node, DEFINED):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if not any(each.endswith((".setter", ".deleter")) for each in decorators):  # a later overload wins
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                found[prefix + node.name] = Lines(first, end)
            _add_python(node.body, f"{prefix}{node.name}.", found)
            if isinstance(node, ast.ClassDef):
                for part in ast.walk(node):  # fields that methods give to `self`
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                        found.setdefault(f"{prefix}{node.name}.{part.attr}", Lines(part.lineno, part.lineno))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            match following:
                case ast.Expr(value=ast.Constant(value=str())):
                    end = following.end_lineno or end
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            for name in names:
                found.setdefault(prefix + name, Lines(node.lineno, end))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            _add_python(ast.iter_child_nodes(node), prefix, found)


def _add_cpp(lines: list[str], inside: Lines, prefix: str, found: dict[str, Lines]) -> None:
    margin = " " * (4 if prefix else 0)
    for number in range(inside.first, inside.last + 1):
        line = lines[number - 1]
        name = CPP_NAME.match(line, len(margin)) if re.match(rf"{margin}\S", line) else None
        if name is None or name[1] in CPP_NO_NAMES or prefix + name[1] in found:
            continue
        first = number
        while re.match(rf"{margin}(template <[^;]*>$|//(?! --8<--))", lines[first - 2]):
            first -= 1
        found[prefix + name[1]] = piece = Lines(first, _cpp_end(lines, number))
        if re.search(r"\b(struct|class) \w+ (\{|:|final)", line):
            _add_cpp(lines, Lines(number + 1, piece.last), f"{prefix}{name[1]}.", found)


def _cpp_end(lines: list[str], first: int) -> int:
    """Return the line on which a definition ends: with its closing brace, or with a semicolon before any brace."""
    depth = 0
    for number in range(first, len(lines) + 1):
        for sign in re.findall(r"[{};]", CPP_NO_CODE.sub("", lines[number - 1])):
            depth += {"{": 1, "}": -1, ";": 0}[sign]
            if depth == 0:
                return number
    return first
