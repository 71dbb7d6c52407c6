"""Run the tools of others on the server: `python -m tests.foreign --venv DIR`, where DIR gets them if it is new."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.foreign.checks import CHECKS
from tests.foreign.environment import Environment


def main() -> None:
    """Run the checks; an error of one of them is raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description="Run others' tools on the server.")
    parser.add_argument("--venv", type=Path, required=True, help="Environment of the tools: 2.5 GB.")
    parser.add_argument("--only", choices=[check.__name__ for check in CHECKS], help="Default: all checks.")
    args = parser.parse_args()
    tools = Environment(args.venv)
    tools.install()
    for check in CHECKS:
        if args.only in (None, check.__name__):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                found = check(tools, Path(folder))
            print(f"{check.__name__}: {found} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
