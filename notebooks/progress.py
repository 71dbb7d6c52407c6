"""What a learner has solved, of all graded exercises and of all parts.

    python -m notebooks.progress           solved and all, and the next open one with its place
    python -m notebooks.progress --reset   forget all of it

`check` records an exercise that passes, and `pytest --part` a part whose contract is kept and which an engine runs: its
name and the date, and no code. The record is `.stepwise-progress.json` in the root of the checkout, or the file that
the environment variable STEPWISE_PROGRESS names, from there; if the variable is empty, nothing is recorded. A record
that cannot be read or written breaks no check: then nothing is recorded, and this program says why.
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FILE, VARIABLE = ".stepwise-progress.json", "STEPWISE_PROGRESS"
KINDS = ("exercises", "parts")
Solved = dict[str, dict[str, str]]
"""By kind: the names of what is solved, each with the date of its first solution."""


class RecordError(Exception):
    """The record cannot be read or written; the message says why."""


# --- the record -------------------------------------------------------------------------------------------------------


def path_of_record() -> Path | None:
    """Return where the record is; None if nothing is to be recorded."""
    named = os.environ.get(VARIABLE, FILE)
    return ROOT / named if named else None


def record(kind: str, name: str) -> None:
    """Note that an exercise or a part is solved. Never raises: the check that calls it has something else to say."""
    path = path_of_record()
    if path is None:
        return
    with suppress(RecordError):
        solved = read(path)
        if name not in solved[kind]:
            solved[kind][name] = date.today().isoformat()
            write(path, solved)


def read(path: Path) -> Solved:
    """Return what is solved; nothing if there is no record yet. Raises `RecordError` for a file of another form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {kind: {} for kind in KINDS}
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    if not _is_record(found):
        raise RecordError(f"{path} is damaged: names and dates of {' and '.join(KINDS)} are expected")
    return found


def _is_record(found: object) -> bool:
    if not isinstance(found, dict) or set(found) != set(KINDS):
        return False
    return all(isinstance(dates, dict) and all(map(_is_date, dates.values())) for dates in found.values())


def _is_date(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None


def write(path: Path, solved: Solved) -> None:
    """Replace the record, as a whole or not at all. Raises `RecordError` if that is impossible."""
    text = json.dumps(solved, indent=1) + "\n"
    try:
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}") from error


# --- what there is ----------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """An exercise or a part."""

    name: str
    milestone: str
    """`m1`."""
    place: str
    """Where to work on it."""


def exercises() -> list[Task]:
    """Return all graded exercises, in the order of the site's navigation."""
    names = re.findall(r"notebooks/(\w+\.ipynb)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    return [task for name in names for task in exercises_of(f"notebooks/{name}")]


def exercises_of(notebook: str) -> Iterator[Task]:
    """Yield the exercises that a notebook checks, each with the heading above it."""
    cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
    section = title = ""
    for cell in cells:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "code":
                if found := re.match(r'check\("((m\d)[\w.]+)"', line):
                    yield Task(found[1], found[2], f"{notebook}, section {section}, {title}")
            elif found := re.match(r"## (\d+)\. ([^:]+)", line):
                section, title = found[1], found[2]
            elif found := re.match(r"### ([^:]+)|\*\*(Exercise \d+)\.\*\*", line):
                title = found[1] or found[2].lower()


def parts() -> list[Task]:
    """Return all parts that can be built. Raises `ImportError` if what their contracts need is not installed."""
    from tests.contracts.part import all_parts  # imports all milestones, which a check does not need

    return [Task(part.name, part.target.split("_")[0], f"starters/{part.name}.py") for part in all_parts().values()]


# --- the program ------------------------------------------------------------------------------------------------------


def recorded() -> tuple[Solved, str]:
    """Return what is recorded, and why nothing is from now on: an empty text if it is."""
    nothing: Solved = {kind: {} for kind in KINDS}
    path = path_of_record()
    if path is None:
        return nothing, f"{VARIABLE} is empty"
    try:
        found = read(path)
    except RecordError as error:
        return nothing, str(error)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return found, ""
    except OSError as error:
        return found, f"{path} cannot be written: {error.strerror}"


def show() -> None:
    """Print a table: two rows for each milestone, exercises and parts."""
    solved, why = recorded()
    tasks, left_out = {"exercises": exercises(), "parts": list[Task]()}, ""
    try:
        tasks["parts"] = parts()
    except ImportError as error:
        left_out = f'Parts are left out: {error}. Their contracts need `pip install -e ".[test]"`.'
    table = Table("milestone", "", "solved", "next", box=SIMPLE_HEAD)
    for milestone in sorted({task.milestone for each in tasks.values() for task in each}):
        for number, (kind, row) in enumerate(_rows(tasks, solved, milestone)):
            table.add_row("" if number else milestone, kind, *row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(", ".join(f"{len(_done(each, solved[kind]))} of {len(each)} {kind}" for kind, each in tasks.items()))
    for line in (left_out, f"Nothing is recorded: {why}." if why else ""):
        if line:
            console.print(line, soft_wrap=True)


def _rows(tasks: dict[str, list[Task]], solved: Solved, milestone: str) -> Iterator[tuple[str, list[str]]]:
    """Yield kind, number and next open task of the exercises and the parts of a milestone."""
    for kind, each in tasks.items():
        if own := [task for task in each if task.milestone == milestone]:
            done = _done(own, solved[kind])
            following = next((task for task in own if task not in done), None)
            place = f"{following.name}\n{following.place}" if following else ""
            yield kind, [f"{len(done)} / {len(own)}", place]


def _done(tasks: Sequence[Task], solved: dict[str, str]) -> list[Task]:
    return [task for task in tasks if task.name in solved]


def reset() -> int:
    """Print what is recorded, and forget it. Returns 1 if that is impossible."""
    path = path_of_record()
    if path is None:
        print(f"Nothing is recorded: {VARIABLE} is empty.")
        return 0
    try:
        lines = [f"{name}, solved on {day}" for dates in read(path).values() for name, day in dates.items()]
    except RecordError as error:
        lines = [str(error)]
    print("\n".join(lines) or "Nothing is recorded.")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        print(f"{path} cannot be removed: {error.strerror}")
        return 1
    if lines:
        print(f"All of this is forgotten: {path} is removed.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Show what is solved, or forget it."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.progress", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reset", action="store_true", help="print what is recorded, and forget it")
    if parser.parse_args(argv).reset:
        return reset()
    show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
