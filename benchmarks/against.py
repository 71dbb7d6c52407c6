"""Compare the speed of this checkout with that of another one: `python -m benchmarks against ../before`.

For a change that should cost no speed. Each case runs in two processes, one with the packages of each checkout; they
load their engine once, and measure in turns. A ratio is the median over the rounds of this checkout's speed by the
other's.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import HERE, OUTPUT, RESULTS, BenchmarkError, check_positive
from benchmarks.compare import measure, paired
from benchmarks.engines import TEXT_MODEL, merged
from benchmarks.lesson import SEED, Row
from benchmarks.machine import commit_of, environment
from benchmarks.metrics import ttfts_of
from benchmarks.report import plain


@dataclass(frozen=True)
class Case:
    """The requests of a round, and the speed that counts."""

    milestone: str
    work: Row
    """Arguments of `workloads.drawn`."""
    unit: str = "tok/s"
    """`tok/s`: of all requests together; `tok/s of a step`: the median of the steps; `first tokens/s`: one divided by
    the median time to a first token."""
    settings: Row = field(default_factory=dict)
    process: Row = field(default_factory=dict)
    """More keywords of `side.Measured`."""
    times: int = 1
    """Number of runs of a round."""

    def speed(self, run: Row) -> float:
        """Return the speed of a run."""
        if self.unit == "first tokens/s":
            return 1 / statistics.median(ttfts_of(run))
        if self.unit == "tok/s of a step":
            return statistics.median(number / seconds for seconds, number in run["steps"])
        return sum(map(len, run["times"])) / run["seconds"]


def work(number: int, length: int, prompts: tuple[int, int] = (32, 32), shared: int = 0) -> Row:
    """Return requests with answers of so many tokens, as arguments of `workloads.drawn`."""
    return {"number": number, "prompts": prompts, "outputs": (length, length), "seed": SEED, "shared": shared}


NATIVE = {"model": {"attention_backend": "native"}}
CASES = {
    "m1": Case("m1", work(1, 256)),
    "m2": Case("m2", work(16, 96)),
    "m3": Case("m3", work(16, 192)),
    "m3, one stream, 2 threads": Case("m3", work(1, 384), process={"threads": 2}),
    "m4, shared prefixes": Case("m4", work(16, 24, (256, 256), 224)),
    "m4, prompts": Case("m4", work(8, 1, (256, 256)), "first tokens/s", times=2),
    "m4, a decode step": Case("m4", work(16, 96), "tok/s of a step"),
    "m5, ragged": Case("m5", work(64, 24, (4, 128)), settings={"scheduler": {"max_num_seqs": 64}}),
    "m6, a decode step": Case("m6", work(16, 96), "tok/s of a step"),
    "m6, one stream, 2 threads": Case("m6", work(1, 384), process={"threads": 2}),
    "m6, two engines": Case(
        "m6", work(1, 2), "first tokens/s", {"disaggregation": {"prefill": 1, "decode": 1}}, times=16
    ),
}
CASES |= {
    f"{milestone}, Python of a decode step, {number} at once": Case(
        milestone, work(number, 384), "tok/s of a step", NATIVE, process={"without_kernels": True, "threads": 1}
    )
    for milestone in ("m3", "m4", "m5", "m6")
    for number in (1, 16)
}


def row_of(name: str, before: Path, rounds: int) -> Row:
    """Measure a case in turns, and return its row in the table."""
    case = CASES[name]
    settings = merged({"model": {"device": "cpu", "dtype": "float32"}}, case.settings)
    spec = {"milestone": case.milestone, "settings": settings} | case.process
    sides = {"before": spec | {"checkout": str(before)}, "now": spec | {"checkout": str(HERE)}}
    row = paired(measure(sides, {"drawn": case.work, "times": case.times}, rounds), case.speed)
    ratios = [now / then for then, now in zip(*row["speeds"].values(), strict=True)]
    commits = {"before": commit_of(before), "now": commit_of(HERE)}
    return row | {"case": name, "ratios": [min(ratios), max(ratios)], "commits": commits}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks against", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(CASES), help="one case; its result replaces the one in the file")
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results")
    args = parser.parse_args(argv)
    check_positive(vars(args), "rounds")
    folder = RESULTS if args.record else args.output
    folder.mkdir(exist_ok=True, parents=True)
    before, path = args.before.resolve(), folder / "against.json"
    if not (before / "m1_single_request").is_dir():
        raise BenchmarkError(f"{args.before} is no checkout: it has no m1_single_request")
    cases: dict[str, Row] = json.loads(path.read_text())["cases"] if args.only and path.exists() else {}
    env = environment(model=TEXT_MODEL, seed=SEED)
    for name in [args.only] if args.only else CASES:
        cases[name] = row_of(name, before, args.rounds)
        path.write_text(json.dumps({"environment": env, "cases": cases}, indent=1) + "\n", encoding="utf-8")
    rows = [row | {"of": CASES[row["case"]]} for row in cases.values()]
    sys.stdout.write(plain(Path(__file__).parent / "against.md.jinja", {"rows": rows, "environment": env}))
    return 0
