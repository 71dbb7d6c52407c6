"""Kill and stop ranks at random moments: `python -m tests.kills.ranks`.

Each time a job of two or four ranks answers requests, or its user thinks; then one rank gets a signal. All others must
have a typed error within 20 s, the job must end, no process may be left, and a new job must serve within 60 s.
"""

import argparse
import json
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks import OUTPUT, RESULTS
from benchmarks.engines import TEXT_MODEL
from benchmarks.machine import environment
from tests.m8_parallel.groups import Group
from tests.m8_parallel.test_lost import END_S, lose

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
SEED = 1


def episode(folder: Path, size: int, rank: int, kind: str, after_s: float, idle: bool) -> dict[str, float]:
    """Lose a rank; return the seconds until the last survivor has its error and until the job has ended, and those of a
    new job until it has answered."""
    model, times = str(TEXT_MODEL), dict[str, float]()
    group = Group(size, folder / "lost")
    try:
        errors = lose(group, model, rank, SIGNALS[kind], after_s, idle=idle, times=times)
    finally:
        group.close()
    assert all(error.startswith("RankLostError: ") for error in errors.values()), errors
    began = time.monotonic()
    again = Group(size, folder / "again")
    try:
        found = again.ask("same", model=model)
        times["serves_again"] = time.monotonic() - began
        assert found["together"] == found["alone"]
    finally:
        again.close()
    assert times["serves_again"] < END_S
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the results, and print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills.ranks", description=__doc__)
    parser.add_argument("--number", type=int, default=40, help="ranks that are lost in all")
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    args = parser.parse_args(argv)
    folder = RESULTS if args.record else OUTPUT
    folder.mkdir(exist_ok=True)
    random, found = Random(SEED), defaultdict[str, list[dict[str, float]]](list)
    for number in range(args.number):
        size = random.choice((2, 2, 4))
        rank, kind, idle = random.randrange(size), random.choice(tuple(SIGNALS)), random.random() < 0.25
        with TemporaryDirectory() as name:
            times = episode(Path(name), size, rank, kind, random.uniform(0, 3), idle)
        found[f"{kind}, {'idle' if idle else 'busy'}"].append(times)
        Console(stderr=True).print(number + 1, f"rank {rank} of {size} {kind}", times)
        longest = {kind: {key: max(row[key] for row in rows) for key in rows[0]} for kind, rows in found.items()}
        results = {
            "environment": environment(model=TEXT_MODEL, seed=SEED),
            "number": {kind: len(rows) for kind, rows in found.items()},
            "longest_s": longest,
        }
        (folder / "kills_ranks.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    Console().print(results["number"], results["longest_s"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
