"""Compares the speed of this checkout with that of another one: `python -m benchmarks.against ../before`.

For a change that should cost no speed. Each case runs in two processes, one with the packages of each checkout; they
load their engine once, and measure in turns, so that a machine that gets slower slows both. Writes
`results/against.json`; a ratio is the median over the rounds of this checkout's speed by the other's.

    python -m benchmarks.against ../before              15 rounds of every case, about 6 minutes on two quiet cores
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import RESULTS, describe, environment, markdown_table
from benchmarks.m3_busy import commit_of
from m1_single_request import DEFAULT_MODEL

SEED = 1
HERE = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What an engine answers in a round, and which speed counts."""

    milestone: str
    num_requests: int
    length: int
    """Tokens of each answer."""
    prompt_lens: tuple[int, int] = (32, 32)
    """The shortest and the longest prompt."""
    shared: int = 0
    """The first so many tokens are the same in all prompts."""
    unit: str = "tok/s"
    """`tok/s`: of all requests together; `tok/s of a step`: the median of the steps; `first tokens/s`: one divided by
    the median time to a first token, of requests one after the other."""
    configs: tuple[str, Mapping[str, Any]] = ("", {})
    """A configuration class and its fields, besides the model."""


CASES = {
    "m1": Case("m1_single_request", 1, 256),
    "m2": Case("m2_continuous_batching", 16, 96),
    "m3": Case("m3_paged_attention", 16, 192),
    "m4, shared prefixes": Case("m4_radix_cache", 16, 24, prompt_lens=(256, 256), shared=224),
    "m5, ragged": Case(
        "m5_chunked_prefill_spec", 64, 24, prompt_lens=(4, 128), configs=("SchedulerConfig", {"max_num_seqs": 64})
    ),
    "m6, a decode step": Case("m6_multimodal_pd", 16, 96, unit="tok/s of a step"),
    "m6, two engines": Case(
        "m6_multimodal_pd", 16, 2, unit="first tokens/s", configs=("DisaggregationConfig", {"prefill": 1, "decode": 1})
    ),
}


def engine_of(case: Case) -> Any:
    """Load the engine of a case, float32 on the CPU."""
    package = importlib.import_module(case.milestone)
    configs = {"model_config": package.ModelConfig(device="cpu", dtype="float32")}
    name, fields = case.configs
    if name:
        configs[f"{name.removesuffix('Config').lower()}_config"] = getattr(package, name)(**fields)
    return package.LLMEngine(**configs), package.SamplingParams(max_tokens=case.length, ignore_eos=True)


def prompts_of(case: Case) -> list[list[int]]:
    """The prompts of a case, the same in every round."""
    rng, (shortest, longest) = Random(SEED), case.prompt_lens
    lens = [rng.randint(shortest, longest) for _ in range(case.num_requests)]
    first = [rng.randrange(256, 4000) for _ in range(case.shared)]
    return [first + [rng.randrange(256, 4000) for _ in range(length - case.shared)] for length in lens]


def measure(name: str) -> Callable[[], Row]:
    """Load the engine of a case; return a function that answers its requests once and returns the speed."""
    case = CASES[name]
    engine, params = engine_of(case)
    prompts = prompts_of(case)
    groups = [[prompt] for prompt in prompts] if case.unit == "first tokens/s" else [prompts]

    def answer() -> Row:
        answers: dict[str, tuple[int, ...]] = {}
        steps: list[float] = []  # tokens per second of a step
        firsts: list[float] = []
        begin = time.perf_counter()
        for group in groups:
            asked, is_first = time.perf_counter(), True
            for prompt in group:
                engine.add_request(prompt, params)
            while engine.has_unfinished_requests():
                began = time.perf_counter()
                outputs = engine.step()
                steps.append(len(outputs) / (time.perf_counter() - began))
                if outputs and is_first:
                    firsts.append(time.perf_counter() - asked)
                    is_first = False
                answers |= {rid: output.token_ids for rid, output in outputs.items()}
        whole = case.num_requests * case.length / (time.perf_counter() - begin)
        if hasattr(engine, "flush_cache"):
            engine.flush_cache()
        texts = repr(sorted(answers.values()))
        speeds = {"tok/s": whole, "tok/s of a step": statistics.median(steps)}
        speeds["first tokens/s"] = 1 / statistics.median(firsts)
        return {"speed": speeds[case.unit], "answers": hashlib.sha256(texts.encode()).hexdigest()[:16]}

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
        "case": lambda row: row["case"],
        "requests": lambda row: str(CASES[row["case"]].num_requests),
        "unit": lambda row: CASES[row["case"]].unit,
        "before": lambda row: f"{row['before']:,.1f}",
        "now": lambda row: f"{row['now']:,.1f}",
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
