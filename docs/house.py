"""The packages as a reader meets them: which files to read in which order, and which package imports which.

    python -m docs.house           writes the tables of the lessons and assets/packages.svg from today's code
    python -m docs.house --check   lists the files that are out of date, and changes nothing; a test does the same

A line of code is a line that is not blank, no comment and no docstring.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from docs.reading_order import IDEAS, READING
from docs.scheme import document

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(IDEAS)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PICTURE = ROOT / "docs" / "assets" / "packages.svg"
BLOCK = re.compile(r"<!-- reading order: ([\w-]+) -->\n.*?<!-- end of reading order -->", re.DOTALL)

BOX_WIDTH, BOX_HEIGHT, STEP_X, STEP_Y, MARGIN = 250, 84, 105, 112, 12
"""Of a package in the picture, and from one to the next, in pixels."""
STYLE = """<style>
.name { font-size: 14px; font-weight: bold }
.small { font-size: 11px }
</style>
<defs>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse"
orient="auto"><path d="M0 0 8 4 0 8z" fill="#888"/></marker>
</defs>"""


def code_lines(path: Path) -> int:
    """Return the number of lines of code of a Python file."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def reading_order(part: str) -> str:
    """Return the table of a lesson, or of a part of it: file, lines of code, and what it shows."""
    package = part.partition("-")[0]
    rows = [f"<!-- reading order: {part} -->", "| file | lines of code | read it for |", "|---|---:|---|"]
    for name, purpose in READING[part]:
        path = f"{package}/{name}"
        rows.append(f"| [{name}](../{path}) | {code_lines(ROOT / path)} | {purpose} |")
    return "\n".join([*rows, "<!-- end of reading order -->"])


def imports(package: str) -> Counter[str]:
    """Return how many import statements of a package name each other package."""
    found: Counter[str] = Counter()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found[node.module.partition(".")[0]] += 1
    return Counter({name: count for name, count in found.items() if name in PACKAGES and name != package})


def picture() -> str:
    """Return the packages as a staircase, with an arrow for each pair of which one imports the other, as SVG."""
    last = len(PACKAGES) - 1
    width, height = STEP_X * last + BOX_WIDTH + 2 * MARGIN, STEP_Y * last + BOX_HEIGHT + 2 * MARGIN
    arrows = [
        _arrow(number, PACKAGES.index(target), count)
        for number, package in enumerate(PACKAGES)
        for target, count in sorted(imports(package).items())
    ]
    title = "The packages, and the number of import statements with which each names an earlier one"
    boxes = [_box(number, package) for number, package in enumerate(PACKAGES)]
    return document(width, height, "\n".join([f"<title>{title}</title>", STYLE, *arrows, *boxes]))


def _corner(number: int) -> tuple[int, int]:
    """Return the upper left corner of a package's box: each later one stands a step higher."""
    return MARGIN + STEP_X * number, MARGIN + STEP_Y * (len(PACKAGES) - 1 - number)


def _box(number: int, package: str) -> str:
    x, y = _corner(number)
    files = [path for path in (ROOT / package).rglob("*.py") if path.stat().st_size]
    size = f"{len(files)} files, {sum(map(code_lines, files)):,} lines of code"
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="#00897b22" stroke="#00897b"/>'
        f'<text class="name" x="{x + 12}" y="{y + 24}">{package}</text>'
        f'<text class="small" x="{x + 12}" y="{y + 42}">{IDEAS[package]}</text>'
        f'<text class="small" x="{x + 12}" y="{y + 58}">{size}</text>'
    )


def _arrow(number: int, target: int, count: int) -> str:
    """Return an arrow from a package down to an earlier one, with its number of import statements at the head.

    It leaves the box at the right of its lower edge and enters the target from the right: the nearest package highest.
    """
    (x, y), (to_x, to_y) = _corner(number), _corner(target)
    start, end_x = x + BOX_WIDTH - 14 * (len(PACKAGES) - number + target), to_x + BOX_WIDTH
    end_y = to_y + 1 + 13 * (number - target)
    number_x = start + 2 if number - target == 1 else end_x + 11  # the nearest arrow is too short for its number
    path = f"M{start} {y + BOX_HEIGHT} V{end_y - 6} Q{start} {end_y} {start - 6} {end_y} H{end_x + 1}"
    return (
        f'<path d="{path}" fill="none" stroke="#888" stroke-width="{1 + count / 50:.1f}" marker-end="url(#head)"/>'
        f'<text class="small" x="{number_x}" y="{end_y - 2}">{count}</text>'
    )


def current() -> dict[Path, str]:
    """Return every file that this program writes, with the text that it should have today."""
    found = {PICTURE: picture()}
    for page in sorted((ROOT / "docs").glob("m?_*.md")):
        found[page] = BLOCK.sub(lambda block: reading_order(block[1]), page.read_text(encoding="utf-8"))
    return found


def outdated() -> dict[Path, str]:
    """Return the files that differ from the code, with the text that they should have."""
    return {p: text for p, text in current().items() if not p.exists() or p.read_text(encoding="utf-8") != text}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files that are out of date, or name them."""
    parser = argparse.ArgumentParser(prog="python -m docs.house", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; the exit status is 1 if a file differs")
    is_check = parser.parse_args(argv).check
    found = outdated()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} {'is out of date' if is_check else 'is written'}")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
