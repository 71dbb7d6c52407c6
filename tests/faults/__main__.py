"""Apply deliberate faults, one at a time, and report which of them the tests find: `python -m tests.faults`.

A fault is a sentence about behaviour and a patch that makes it true (`*.toml`). The faults were chosen from the code
alone, without a look at the tests, so the share that is found estimates how many of tomorrow's faults would be found.
Each fault is applied to a copy of the repository. `pytest` runs there until its first failure: the tests of the fault's
milestone, then the whole default suite. Not part of any suite: a fault that is not found takes as long as the suite.

    python -m tests.faults                      all faults; about a minute each
    python -m tests.faults m3-04 m5             one fault, and those of a milestone
    python -m tests.faults --near               the tests of the fault's milestone only
    python -m tests.faults --output found.json  a result per fault, written after each; those in the file are kept
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_S = 900.0
"""A run that takes longer counts as a failure of the tests: the fault makes the engine hang."""
Fault = dict[str, str]


def faults() -> list[Fault]:
    """Return all faults of the `*.toml` files, in the order of their ids."""
    found = [fault for path in HERE.glob("*.toml") for fault in tomllib.loads(path.read_text())["fault"]]
    return sorted(found, key=lambda fault: fault["id"])


def patched(fault: Fault, text: str) -> str:
    """Return the file's text with the fault in it. Raises `ValueError` unless the text to replace occurs once."""
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['id']}: the text to replace occurs {text.count(fault['old'])} times")
    return text.replace(fault["old"], fault["new"])


def copy_of_the_repository(target: Path) -> None:
    """Copy the tracked and the new files, but not what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def first_failure(root: Path, arguments: Sequence[str]) -> str | None:
    """Run pytest in a copy until the first failure. Return the test that failed, or None if all passed."""
    fits = "--ignore=tests/structure/test_faults.py"  # it holds the patches to today's code
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fits, *arguments]
    env = os.environ | {"PYTHONPATH": str(root)}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"(no end after {LIMIT_S:g} s)"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"(pytest ended with {done.returncode})"


def tried(fault: Fault, *, near: bool) -> dict[str, Any]:
    """Apply a fault and run the tests."""
    milestone = fault["file"].partition("/")[0]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_of_the_repository(root)
        path = root / fault["file"]
        path.write_text(patched(fault, path.read_text()))
        found_by = first_failure(root, [f"tests/{milestone}"])
        if found_by is None and not near:
            found_by = first_failure(root, ())
    return {"found_by": found_by, "seconds": round(time.monotonic() - began)}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the chosen faults. Returns 1 if one of them is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("chosen", nargs="*", help="ids, or beginnings of them (default: all faults)")
    parser.add_argument("--near", action="store_true", help="run the tests of the fault's milestone only")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    results = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    chosen = [fault for fault in faults() if not args.chosen or fault["id"].startswith(tuple(args.chosen))]
    for fault in chosen:
        if fault["id"] not in results:
            results[fault["id"]] = tried(fault, near=args.near)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1) + "\n")
        found_by = results[fault["id"]]["found_by"]
        print(f"{fault['id']}  {fault['behaviour']}\n       {found_by or 'NOT FOUND'}", flush=True)
    missed = [fault["id"] for fault in chosen if results[fault["id"]]["found_by"] is None]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found; not found: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
