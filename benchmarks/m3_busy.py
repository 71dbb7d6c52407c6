"""Measures decoding beside a busy program: `python -m benchmarks.m3_busy`.

The sides take turns, each in a process of its own: a quiet machine, a machine on which another process spins without a
pause, and with `--against` another checkout on a quiet machine. Each process decodes the same tokens, for one request
and for sixteen at once, with the embedded checkpoint and with the shape of Qwen3-0.6B (random weights, bfloat16).
Writes `results/m3_busy.json` after each round, and `results/m3_busy.md`, the table that the lesson includes. A number
is the median of its rounds, a ratio the median of the ratios of its rounds.

    python -m benchmarks.m3_busy --against ../before     15 rounds of both models, about 25 minutes on two quiet cores
    python -m benchmarks.m3_busy --minutes 4             a piece of it: each call goes on where the last one stopped
    python -m benchmarks.m3_busy --only embedded         one model
    python -m benchmarks.m3_busy --quick                 one round, few tokens: its numbers are no results
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, describe, environment, markdown_table
from benchmarks.m3_machine import LoadMeter
from benchmarks.m3_models import TestedModel, embedded_model, random_model
from benchmarks.m3_workload import Ragged
from m3_paged_attention import DEFAULT_MODEL

SEED = 1
NAME = "m3_busy"
STREAMS = (1, 16)
PROMPT_LEN = 32
TOKENS = {"0.6B": {1: (64, 1), 16: (32, 1)}, "embedded": {1: (512, 4), 16: (256, 2)}}
"""For each model and number of requests: tokens of an answer, and how often all are answered."""
QUICK_TOKENS = {name: dict.fromkeys(STREAMS, (8, 1)) for name in TOKENS}
SPIN = "print(flush=True)\nwhile True: pass"
HERE = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def decode_speeds(model: TestedModel, tokens: dict[int, tuple[int, int]], *, is_busy: bool) -> Row:
    """Tokens per second for each number of requests; a spinning process runs beside them if `is_busy`."""
    found: Row = {}
    engine = model.engine(max_num_seqs=max(STREAMS))
    for streams, (length, times) in tokens.items():
        work = Ragged.drawn(streams, prompts=(PROMPT_LEN, PROMPT_LEN), outputs=(length, length), seed=SEED)
        work.shortened().run(engine)
        other = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) if is_busy else None
        try:
            if other is not None and other.stdout is not None:
                other.stdout.readline()  # it runs now
            begin = time.perf_counter()
            with LoadMeter() as meter:
                answers = [work.run(engine) for _ in range(times)]
            seconds = time.perf_counter() - begin
        finally:
            if other is not None:
                other.kill()
                other.communicate()
        found[str(streams)] = {
            "tokens": times * work.num_output_tokens,
            "tokens_per_second": times * work.num_output_tokens / seconds,
            "answers": hashlib.sha256(repr(answers).encode()).hexdigest()[:16],
            "other_cores": meter.other_cores,
        }
    return found


def in_own_process(name: str, side: str, against: Path | None, quick: bool) -> Row:
    """Measure one side of one model in a fresh process, with the packages of the side's checkout."""
    root = against if side == "before" and against is not None else HERE
    command = [sys.executable, "-P", __file__, "--measure", name, *(["--busy"] if side == "busy" else [])]
    env = os.environ | {"PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command + (["--quick"] if quick else []), cwd=root, env=env, stdout=subprocess.PIPE, check=True, text=True
    )
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_here(name: str, *, is_busy: bool, quick: bool) -> None:
    """What `in_own_process` starts: measure one side and print it."""
    with tempfile.TemporaryDirectory() as folder:
        model = embedded_model(SEED) if name == "embedded" else random_model(SEED, Path(folder))
        speeds = decode_speeds(model, (QUICK_TOKENS if quick else TOKENS)[name], is_busy=is_busy)
        model.close()
    sys.stdout.write(json.dumps(speeds) + "\n")


def start(path: Path, env: Row) -> Row:
    """Results to fill: those of an earlier call, if it had the same environment."""
    if path.exists():
        earlier: Row = json.loads(path.read_text(encoding="utf-8"))
        if earlier["environment"] == env:
            return earlier
    return {"environment": env, "rounds": {name: [] for name in TOKENS}}


def rows_of(results: Row) -> list[Row]:
    """A row of the table for each model and number of requests."""
    rows = []
    for name, rounds in results["rounds"].items():
        for streams in map(str, STREAMS) if rounds else ():
            speeds = {
                side: [each[side][streams]["tokens_per_second"] for each in rounds if side in each]
                for side in ("before", "quiet", "busy")
            }
            answers = {each[side][streams]["answers"] for each in rounds for side in each}
            rows.append(
                {side: statistics.median(values) for side, values in speeds.items() if values}
                | {
                    "model": name,
                    "streams": streams,
                    "rounds": len(rounds),
                    "busy_ratio": _ratio(speeds["busy"], speeds["quiet"]),
                    "quiet_ratio": _ratio(speeds["quiet"], speeds["before"]) if speeds["before"] else None,
                    "same_answers": len(answers) == 1,
                }
            )
    return rows


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def table(results: Row) -> str:
    """What the lesson includes."""
    columns = {
        "model, requests": lambda row: f"{row['model']}, {row['streams']}",
        "quiet, tok/s": lambda row: f"{row['quiet']:,.1f}",
        "beside a busy process, tok/s": lambda row: f"{row['busy']:,.1f}",
        "share of quiet": lambda row: f"{row['busy_ratio']:.2f}",
        "quiet, of before": lambda row: f"{row['quiet_ratio']:.2f}" if row["quiet_ratio"] else "-",
        "rounds": lambda row: str(row["rounds"]),
        "same tokens": lambda row: "yes" if row["same_answers"] else "NO",
    }
    return f"{markdown_table(rows_of(results), columns)}\n\n{describe(results['environment'])}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each model, earlier calls included")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no round after so many minutes")
    parser.add_argument("--against", type=Path, help="another checkout, measured on the quiet machine as 'before'")
    parser.add_argument("--only", choices=list(TOKENS), help="one model")
    parser.add_argument("--quick", action="store_true", help="one round, few tokens: to see that all of it works")
    parser.add_argument("--output", type=Path, help="a folder for everything that is written")
    parser.add_argument("--measure", choices=list(TOKENS), help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        measure_here(args.measure, is_busy=args.busy, quick=args.quick)
        return 0
    if args.quick and args.output is None:
        args.output = Path(tempfile.gettempdir()) / NAME
    texts, against = args.output or RESULTS, args.against and args.against.resolve()
    texts.mkdir(exist_ok=True, parents=True)
    path = texts / f"{NAME}.json"
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED) | {"quick": args.quick, "against": commit_of(against)}
    results, end = start(path, env), time.monotonic() + 60 * args.minutes
    sides = ["quiet", "busy"] if against is None else ["before", "quiet", "busy"]
    names = [args.only] if args.only else list(TOKENS)
    for number in range(1 if args.quick else args.rounds):
        for name in names:
            rounds = results["rounds"][name]
            if len(rounds) > number or time.monotonic() > end:
                continue
            order = sides if number % 2 == 0 else sides[::-1]  # no side is always the first one
            rounds.append({side: in_own_process(name, side, against, args.quick) for side in order})
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = table(results)
    (texts / f"{NAME}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


def commit_of(checkout: Path | None) -> str | None:
    """The commit of another checkout, as far as git knows it."""
    if checkout is None:
        return None
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    return "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
