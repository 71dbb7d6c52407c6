"""Compare two engines on one workload: `python -m benchmarks run --milestone m4 --parts mine.py:PARTS`.

Each side runs in its own process. In every round both answer the same requests, one after the other, from an empty
cache, so that a disturbance of the machine meets both; the first round only warms up. Differences are taken round by
round, with a 95 % confidence interval over the rounds (Student's t; none below three rounds). Other programs beside the
measurement make the intervals wide, they do not favour a side.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import OUTPUT, PACKAGES, BenchmarkError, Row, check_positive, lesson, metrics
from benchmarks.engines import SEEING_MODEL, TEXT_MODEL, has_settings, merged, parsed_settings
from benchmarks.machine import environment
from benchmarks.metrics import METRICS, Goal
from benchmarks.serving import num_same
from benchmarks.side import SideProcess
from benchmarks.timing import LEAST_ROUNDS, ratio
from benchmarks.workloads import WORKLOADS, named

WORKLOAD_LINES = "\n".join(f"  {name:10}{make.__doc__}" for name, (_, make) in WORKLOADS.items())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command `run`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks run",
        description="Compare two engines on one workload, in paired rounds.",
        epilog=f"workloads:\n{WORKLOAD_LINES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    side = parser.add_argument_group("the measured engine")
    side.add_argument("--milestone", choices=list(PACKAGES), default="m6")
    side.add_argument("--parts", metavar="FILE.py:NAME", help="a dictionary from roles to classes of your own")
    side.add_argument("--set", action="append", default=[], metavar="cache.page_size=4", help="a setting; repeatable")
    other = parser.add_argument_group("the engine that it is compared with")
    other.add_argument(
        "--against",
        metavar="m3 | FILE.py:NAME | same",
        help="a milestone, or the same milestone with other parts or as it is; default: as it is where --parts or "
        "--set is given, else the milestone before",
    )
    other.add_argument("--set-against", action="append", default=[], metavar="cache.page_size=4", help="its settings")
    both = parser.add_argument_group("both")
    both.add_argument("--model", help="a directory or hub id; default: the embedded checkpoint")
    both.add_argument("--device", default="auto")
    both.add_argument("--dtype", default="auto")
    both.add_argument("--kv-cache-dtype", help="format of the KV, from m3 on; default: the model's precision")
    both.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    work = parser.add_argument_group("work")
    work.add_argument("--workload", default="ragged", metavar="NAME | FILE.jsonl", help="see below")
    work.add_argument("--requests", type=int, help="number of requests; default: the workload's")
    work.add_argument("--rate", type=float, help="requests per second, at random times, also of a file's requests")
    work.add_argument("--rounds", type=int, default=10)
    work.add_argument("--seed", type=int, default=1)
    work.add_argument("--ttft-ms", type=float, default=500, help="a good request has its first token by then")
    work.add_argument("--gap-ms", type=float, default=50, help="and such a mean gap between tokens, at most")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results; default: ./benchmark-results")
    return parser


# --- the sides --------------------------------------------------------------------------------------------------------


def sides_of(args: argparse.Namespace) -> dict[str, Row]:
    """Return the specification of each side by its name. Raises `BenchmarkError` for what cannot be a side."""
    check_positive(vars(args), "rounds", "rate", "requests", "threads")
    workload = named(args.workload, number=args.requests, rate=args.rate, seed=args.seed)
    own = {"milestone": args.milestone, "parts": args.parts, "set": args.set}
    model = args.model or str(SEEING_MODEL if args.workload == "pictures" else TEXT_MODEL)
    both: Row = {"model": {"model": model, "device": args.device, "dtype": args.dtype}}
    if args.kv_cache_dtype is not None:
        both["cache"] = {"kv_cache_dtype": args.kv_cache_dtype}
    sides = {}
    for side in (own, other_side(args)):
        milestone, settings = side["milestone"], workload.settings
        if not has_settings(milestone, "speculative"):
            settings = {section: fields for section, fields in settings.items() if section != "speculative"}
        if args.workload == "pictures" and milestone != "m6":
            raise BenchmarkError(f"{milestone} reads no pictures: use --milestone m6 and --against same")
        if "cache" in settings | both and not has_settings(milestone, "cache"):
            raise BenchmarkError(f"{milestone} has no settings of the KV memory: use m3 or later")
        name = " ".join([milestone, *filter(None, [side["parts"]]), *side["set"]])
        sides[f"{name}, again" if name in sides else name] = {
            "milestone": milestone,
            "parts": side["parts"],
            "settings": merged(both, settings, parsed_settings(side["set"])),
            "threads": args.threads,
        }
    return sides


def other_side(args: argparse.Namespace) -> Row:
    """Return milestone, parts and settings of the side that `--against` names."""
    against: str | None = args.against
    before = list(PACKAGES)[max(0, list(PACKAGES).index(args.milestone) - 1)]
    is_changed = bool(args.parts or args.set)
    if against is None:
        against = "same" if is_changed or before == args.milestone else before
    if against in PACKAGES or against == "same":
        milestone = args.milestone if against == "same" else against
        return {"milestone": milestone, "parts": None, "set": args.set_against}
    if ".py:" not in against:
        raise BenchmarkError(f"--against {against} is neither same, {', '.join(PACKAGES)}, nor FILE.py:NAME")
    return {"milestone": args.milestone, "parts": against, "set": args.set_against}


def measure(sides: dict[str, Row], workload: Row, rounds: int) -> dict[str, list[Row]]:
    """Measure the sides in turns, each in its own process; neither is always the first."""
    found: dict[str, list[Row]] = {name: [] for name in sides}
    console = Console(stderr=True)
    with ExitStack() as stack:
        running = {name: stack.enter_context(SideProcess(dict(spec))) for name, spec in sides.items()}
        for number in track(range(rounds + 1), "rounds", console=console, disable=not console.is_terminal):
            for name in list(running)[:: 1 if number % 2 else -1]:
                run = running[name](dict(workload))
                if number:
                    found[name].append(run)
    return found


def paired(runs: Mapping[str, Sequence[Row]], speed: Callable[[Row], float]) -> Row:
    """Return the median speed of each of two sides, the ratio of the second to the first, and whether all answers are
    the same."""
    speeds = {name: [speed(run) for run in own] for name, own in runs.items()}
    first, second = speeds.values()
    answers = [run["answers"] for own in runs.values() for run in own]
    return {name: statistics.median(own) for name, own in speeds.items()} | {
        "ratio": ratio(second, first),
        "speeds": speeds,
        "same_answers": all(own == answers[0] for own in answers),
        "load": {name: [run["load"] for run in own] for name, own in runs.items()},
    }


# --- the report -------------------------------------------------------------------------------------------------------


def report_of(runs: dict[str, list[Row]], goal: Goal) -> Row:
    """Return the metrics of every side, their comparison, and whether the tokens are the same."""
    values = {name: metrics.measured(own, goal) for name, own in runs.items()}
    report: Row = {
        "sides": {
            name: {metric: metrics.summary(rounds) | {"rounds": rounds} for metric, rounds in own.items()}
            for name, own in values.items()
        },
        "load": {name: [run["load"] for run in own] for name, own in runs.items()},
        "gaps": {name: metrics.gaps_of(own[-1]) for name, own in runs.items()},
    }
    own, other = values.values()
    report["comparison"] = {
        metric: metrics.compared(METRICS[metric], own[metric], other[metric]) for metric in own if metric in other
    }
    answers = [[run["answers"] for run in rounds] for rounds in runs.values()]
    report["same_tokens"] = min(num_same(*pair) for pair in zip(*answers, strict=True))
    report["num_requests"], report["num_rounds"] = len(answers[0][0]), len(answers[0])
    return report


def table(report: Row) -> Table:
    """Return the report as a table for the terminal."""
    shown = Table(title="mean over the rounds [95 % confidence interval]", title_justify="left")
    shown.add_column("")
    for name in (*report["sides"], "first against second"):
        shown.add_column(name, justify="right", overflow="fold")
    for name, metric in METRICS.items():
        cells = [metrics.formatted(metric, own[name]) if name in own else "-" for own in report["sides"].values()]
        if name in report["comparison"]:
            cells.append(metrics.formatted_comparison(metric, report["comparison"][name]))
        if set(cells) != {"-"}:
            shown.add_row(name, *cells)
    return shown


def conclusion(report: Row) -> str:
    """Return whether the tokens are the same, and whether other programs disturbed the measurement."""
    same, number = report["same_tokens"], report["num_requests"]
    end = "The tokens are the same." if same == number else "The sides do NOT give the same tokens."
    lines = [f"{same} of {number} answers are equal in every round. {end}"]
    if any(load["disturbed"] for loads in report["load"].values() for load in loads):
        lines.append("Other programs took more than a tenth of a core in some rounds.")
    if report["num_rounds"] < LEAST_ROUNDS:
        lines.append(f"Fewer than {LEAST_ROUNDS} rounds give no confidence interval.")
    return " ".join(lines)


def run(args: argparse.Namespace, console: Console) -> None:
    """Measure, print the table, and write JSON and plot."""
    sides = sides_of(args)
    workload = {"name": args.workload, "number": args.requests, "rate": args.rate, "seed": args.seed}
    runs = measure(sides, workload, args.rounds)
    report = report_of(runs, Goal(args.ttft_ms / 1e3, args.gap_ms / 1e3))
    console.print(table(report))
    console.print(conclusion(report), highlight=False)
    model = Path(next(iter(sides.values()))["settings"]["model"]["model"])
    results = {"environment": environment(model=model, seed=args.seed), "arguments": vars(args)} | report
    args.output.mkdir(exist_ok=True, parents=True)
    path = args.output / "run.json"
    path.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"written to {args.output}", highlight=False)
    lesson.drawn(lambda: draw(report, args.output / "run.svg"), console)


def draw(report: Row, path: Path) -> None:
    """Draw ratios and gaps."""
    from benchmarks.plots import comparison, save

    save(comparison(report), path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    run(make_parser().parse_args(argv), Console(width=None))
    return 0
