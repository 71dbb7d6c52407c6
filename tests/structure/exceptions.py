"""Known breaches of the rules, in `exceptions.toml`: what breaks which rule, and why it may.

python -m tests.structure.exceptions --list     what breaks a rule today, in the format of the file
python -m tests.structure.exceptions --prune    removes the entries of the file that nothing needs any more
"""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.structure.circles import files_import_in_one_direction
from tests.structure.inheritance import INHERITANCE
from tests.structure.protocols import protocols_have_two_implementations
from tests.structure.sources import Finding, Source
from tests.structure.unused import everything_is_read, options_are_given

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("exceptions.toml")
MILESTONES = sorted(path.parent.name for path in ROOT.glob("m[1-9]_*/__init__.py"))
RULES = {
    rule.__name__: rule
    for rule in (
        everything_is_read,
        options_are_given,
        *INHERITANCE,
        protocols_have_two_implementations,
        files_import_in_one_direction,
    )
}
HEADING = """\
# What breaks a rule of tests/structure, and why it may. The list only shrinks: a new entry needs a reason that lasts.
# `python -m tests.structure.exceptions --prune` removes the entries that nothing needs any more.
exceptions = [
"""


class Key(NamedTuple):
    """An exception is about one name and one rule."""

    name: str
    rule: str


def read(text: str) -> dict[Key, str]:
    """Reasons by what they excuse."""
    entries = tomllib.loads(text)["exceptions"]
    found = {Key(entry["name"], entry["rule"]): entry["reason"] for entry in entries}
    if len(found) != len(entries):
        raise ValueError("an exception stands in the file twice")
    return found


def write(exceptions: Mapping[Key, str]) -> str:
    """The file, one line for each exception, in order."""
    lines = [
        f'  {{ name = "{key.name}", rule = "{key.rule}", reason = "{reason}" }},\n'
        for key, reason in sorted(exceptions.items())
    ]
    return "".join([HEADING, *lines, "]\n"])


def findings(source: Source) -> dict[Key, Finding]:
    """Findings of all rules."""
    return {Key(finding.name, name): finding for name, rule in RULES.items() for finding in rule(source)}


def current(found: Iterable[Key], reasons: Mapping[Key, str]) -> dict[Key, str]:
    """Exceptions for all that was found; without a reason where there is none so far."""
    return {key: reasons.get(key, "") for key in found}


def main(arguments: list[str]) -> None:
    """Print or prune the list."""
    reasons = read(FILE.read_text(encoding="utf-8"))
    found = current(findings(Source.from_packages(ROOT, MILESTONES)), reasons)
    if arguments == ["--list"]:
        sys.stdout.write(write(found))
    elif arguments == ["--prune"]:
        FILE.write_text(write({key: reason for key, reason in found.items() if key in reasons}), encoding="utf-8")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
