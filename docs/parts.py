"""The parts that a learner can build, as the page `build_a_part.md` lists them, and what typical mistakes are told.

python -m docs.parts           writes the tables of the page from today's contracts
python -m docs.parts --check   says whether they are out of date, and changes nothing; a test does the same
"""

import argparse
import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from tests.contracts.part import Part, all_parts, function_of, grade

PAGE = Path(__file__).parent / "build_a_part.md"
BLOCK = re.compile(r"<!-- (parts|mistakes) -->\n.*?<!-- end of \1 -->", re.DOTALL)


def in_order() -> list[Part]:
    """Return all parts, by milestone and then by name."""
    return sorted(all_parts().values(), key=lambda part: (part.target.split("_")[0], part.name))


def table() -> str:
    """Return the table of parts: name, idea, and the section that explains it."""
    rows = ["| part | what you build | explained in | from |", "|---|---|---|---|"]
    for part in in_order():
        page, _, anchor = part.lesson.removeprefix("docs/").partition("#")
        section = f"[{part.target.split('_')[0]}: {heading(page, anchor)}]({page}#{anchor})"
        rows.append(f"| `{part.name}` | {idea(part)} | {section} | [starter](../starters/{part.name}.py) |")
    return "\n".join(rows)


def heading(page: str, anchor: str) -> str:
    """Return the text of the heading with this anchor, without its number and its second half."""
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    found = {slug(title): title for title in re.findall(r"^#+ (.*?)$", text, re.M)}
    return re.sub(r"^\d+\. ", "", found[anchor]).partition(": ")[0]


def slug(title: str) -> str:
    """Return the anchor of a heading, on the site and on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def idea(part: Part) -> str:
    """Return the first sentence of a contract, without what all have in common."""
    first = " ".join((inspect.getdoc(part.contract) or "").split("\n\n")[0].split())
    return re.sub(r"^Contract of (the )?", "", first).rstrip(".")


def mistakes() -> str:
    """Return one mistake of each part, and what the learner reads."""
    blocks = []
    for part in in_order():
        solution, hint = importlib.import_module(f"tests.contracts.wrong.{part.name}").WRONG[0]
        said = (inspect.getdoc(function_of(solution)) or "").splitlines()[0]
        text = next(failure.text for failure in grade(part, solution) if hint in failure.text)
        blocks.append(f"**{part.name}.** {said}\n\n```text\n{text}\n```")
    return "\n\n".join(blocks)


def written(page: str) -> str:
    """Return the page with these blocks made anew."""
    makers = {"parts": table, "mistakes": mistakes}

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n{makers[name]()}\n<!-- end of {name} -->"

    return BLOCK.sub(block, page)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or say that it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m docs.parts", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if before == after:
        return 0
    if not args.check:
        PAGE.write_text(after, encoding="utf-8")
    print(f"docs/{PAGE.name} is {'out of date' if args.check else 'written'}")
    return int(args.check)


if __name__ == "__main__":
    raise SystemExit(main())
