"""Compares the speed of this checkout with that of another one: `python -m benchmarks.against ../before`.

For a change that should cost no speed. Each case runs in two processes, one with the packages of each checkout; they
load their engine once, and measure in turns, so that a machine that gets slower slows both. Writes
`results/against.json`; a ratio is the median over the rounds of this checkout's tokens per second by the other's.

    python -m benchmarks.against ../before              15 rounds of every case, about 3 minutes on two quiet cores
    python -m benchmarks.against ../before --only m1    one case
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import RESULTS, describe, environment, markdown_table
from benchmarks.m3_busy import commit_of
from m1_single_request import DEFAULT_MODEL

SEED = 1
PROMPT_LEN = 32
CASES = {
    "m1": ("m1_single_request", 1, 256),
    "m2": ("m2_continuous_batching", 16, 96),
    "m3": ("m3_paged_attention", 16, 192),
    "m6": ("m6_multimodal_pd", 16, 96),
}
"""For each case: the milestone, the number of requests, and the tokens of each answer. m6: decode steps only."""
HERE = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def measure(name: str) -> Callable[[], Row]:
    """Load the engine of a case; return a function that answers its requests once and returns tokens per second."""
    milestone, num_requests, length = CASES[name]
    package = importlib.import_module(milestone)
    engine = package.LLMEngine(model_config=package.ModelConfig(device="cpu", dtype="float32"))
    params = package.SamplingParams(max_tokens=length, ignore_eos=True)
    rng = Random(SEED)
    prompts = [[rng.randrange(256, 4000) for _ in range(PROMPT_LEN)] for _ in range(num_requests)]

    def answer() -> Row:
        for prompt in prompts:
            engine.add_request(prompt, params)
        answers: dict[str, tuple[int, ...]] = {}
        steps: list[float] = []  # tokens per second of a step
        begin = time.perf_counter()
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            steps.append(len(outputs) / (time.perf_counter() - began))
            answers |= {rid: output.token_ids for rid, output in outputs.items()}
        whole = num_requests * length / (time.perf_counter() - begin)
        if hasattr(engine, "flush_cache"):
            engine.flush_cache()
        texts = repr(sorted(answers.values()))
        speed = statistics.median(steps) if name == "m6" else whole
        return {"speed": speed, "answers": hashlib.sha256(texts.encode()).hexdigest()[:16]}

    return answer


def serve(name: str) -> None:
    """Measure once for every line of stdin: what the processes of a case do."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints does not disturb
    answer = measure(name)
    answer()  # warms up
    for _ in sys.stdin:
        out.write(json.dumps(answer()) + "\n")
        out.flush()


@contextmanager
def side(name: str, checkout: Path) -> Iterator[Callable[[], Row]]:
    """A process with the packages of a checkout; calling the value measures once."""
    command = [sys.executable, "-P", str(HERE / "benchmarks" / "against.py"), "--measure", name, str(checkout)]
    paths = f"{checkout}{os.pathsep}{HERE}"  # `benchmarks` may be of this checkout, the packages are not
    env = os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def once() -> Row:
            process.stdin.write("\n")
            process.stdin.flush()
            found: Row = json.loads(process.stdout.readline())
            return found

        try:
            yield once
        finally:
            process.kill()


def rounds_of(name: str, before: Path, rounds: int) -> list[dict[str, Row]]:
    """Measure both sides in turns; neither is always the first one."""
    found = []
    with contextlib.ExitStack() as stack:
        sides = {key: stack.enter_context(side(name, path)) for key, path in (("before", before), ("now", HERE))}
        for number in range(rounds):
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            measured = {key: sides[key]() for key in order}
            found.append(measured)
    return found


def row_of(name: str, rounds: Sequence[dict[str, Row]]) -> Row:
    """The row of a case in the table."""
    ratios = [each["now"]["speed"] / each["before"]["speed"] for each in rounds]
    return {
        "case": name,
        **{key: statistics.median(each[key]["speed"] for each in rounds) for key in ("before", "now")},
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "same_answers": len({each[key]["answers"] for each in rounds for key in each}) == 1,
    }


def table(rows: Sequence[Row]) -> str:
    columns = {
        "case, requests": lambda row: f"{row['case']}, {CASES[row['case']][1]}",
        "before, tok/s": lambda row: f"{row['before']:,.1f}",
        "now, tok/s": lambda row: f"{row['now']:,.1f}",
        "ratio": lambda row: f"{row['ratio']:.3f}",
        "of all rounds": lambda row: "{:.2f} to {:.2f}".format(*row["ratios"]),
        "same tokens": lambda row: "yes" if row["same_answers"] else "NO",
    }
    return markdown_table(rows, columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(CASES), help="one case; its result replaces the one in the file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder for what is written")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        serve(args.measure)
        return 0
    before, path = args.before.resolve(), args.output / "against.json"
    cases: dict[str, Row] = json.loads(path.read_text())["cases"] if args.only and path.exists() else {}
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED)
    for name in [args.only] if args.only else CASES:
        measured = rounds_of(name, before, args.rounds)
        commits = {"before": commit_of(before), "now": commit_of(HERE)}
        cases[name] = row_of(name, measured) | {"commits": commits, "rounds": measured}
        path.write_text(json.dumps({"environment": env, "cases": cases}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{table(list(cases.values()))}\n\n{describe(env)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
