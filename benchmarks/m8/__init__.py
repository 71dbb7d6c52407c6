"""The measurements of lesson 8: two ranks beside one process, their collectives and memory, and a large model on paper.

Two ranks have one thread each, the process that they are compared with has two. The sides take turns, each with an
engine that stays.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import BenchmarkError
from benchmarks.engines import EMBEDDED, Model, random_model
from benchmarks.lesson import Lesson, Parts, Row, Size, backend
from benchmarks.timing import ratio

SIDES = {"one process": (1, 2), "two ranks": (2, 1)}
"""Number of processes, and threads of each."""
BATCHES, LENGTH = (1, 16), 64
START_S = 300.0


class Side:
    """An engine in processes of its own."""

    def __init__(self, folder: Path, settings: Row, num_ranks: int) -> None:
        folder.mkdir()
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        self.folder, self.number = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", "benchmarks.m8.side", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": str(settings["threads"])},
        )

    def ask(self, question: Any) -> Path:
        """Put a question; return where its answer will be."""
        self.number += 1
        written = self.folder / "question.tmp"
        written.write_text(json.dumps(question), encoding="utf-8")
        written.rename(self.folder / f"question-{self.number}.json")
        return self.folder / f"answer-{self.number}.json"

    def answer(self, **question: int) -> Row:
        """Return the answer to a question."""
        path, end = self.ask(question), time.monotonic() + START_S
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise BenchmarkError("the processes of an engine have ended, or do not answer")
            time.sleep(0.01)
        found: Row = json.loads(path.read_text("utf-8"))
        return found

    def close(self) -> None:
        """End the processes."""
        self.ask(None)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()


@contextmanager
def sides(model: Model) -> Iterator[dict[str, Side]]:
    """Yield both sides, started one after the other."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        found = {}
        for side, (num_ranks, threads) in SIDES.items():
            settings = {
                "model": {"model": str(model.directory), "dtype": model.dtype, "load_format": model.load_format},
                "threads": threads,
                "kv_bytes": 2**28,
                "most": max(BATCHES),
            }
            found[side] = Side(Path(name) / side.replace(" ", "-"), settings, num_ranks)
            stack.callback(found[side].close)
            found[side].answer(number=1, length=8, num_steps=2)
        yield found


def speed(model: Model, size: Size) -> Row:
    """Measure both sides in turns."""
    num_steps, length = (2, 16) if size.quick else (32, LENGTH)
    with sides(model) as both:
        rows = []
        for number in BATCHES:
            found: dict[str, list[Row]] = {name: [] for name in both}
            for turn in range(size.rounds + 1):
                for name, side in both.items():
                    answer = side.answer(number=number, length=length, num_steps=num_steps)
                    if turn:  # the first round warms up
                        found[name].append(answer)
            one, two = found["one process"], found["two ranks"]
            rows.append(
                {
                    "requests": number,
                    **{
                        name: {phase: statistics.median(each[phase] for each in own) for phase in ("decode", "prompts")}
                        for name, own in found.items()
                    },
                    **{
                        phase: ratio([each[phase] for each in one], [each[phase] for each in two])
                        for phase in ("decode", "prompts")
                    },
                    "collectives": collectives_of([each["collectives"] for each in two]),
                }
            )
        ranks, alone = two[-1]["ranks"], one[-1]
    return {"rows": rows, "ranks": ranks, "alone": {key: alone[key] for key in ("resident",)}, "length": length}


def collectives_of(steps: list[Any]) -> list[Row]:
    """Return number, bytes and median seconds of the collectives of a decode step, by kind."""
    found = []
    for kind in dict.fromkeys(kind for kind, *_ in steps[0]):
        own = [[each for each in step if each[0] == kind] for step in steps]
        seconds = statistics.median(sum(each[2] for each in step) for step in own)
        found.append(
            {"kind": kind, "number": len(own[0]), "bytes": sum(each[1] for each in own[0]), "seconds": seconds}
        )
    return found


def arithmetic(model: Model, number: int, num_ranks: int = 2) -> Row:
    """Return the number and bytes of the collectives of a decode step of so many requests, by kind."""
    config = json.loads((model.directory / "config.json").read_text("utf-8"))
    layers, hidden, vocabulary = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    width = 2 if model.dtype == "bfloat16" else 4
    return {
        "broadcast": [2, 2 * 1024],
        "all-reduce": [2 * layers + 1, (2 * layers + 1) * number * hidden * width],
        "gather": [1, number * -(-vocabulary // num_ranks) * 4],
    }


def of_embedded(size: Size) -> Row:
    """Measure the embedded model."""
    return speed(EMBEDDED, size) | {"arithmetic": {number: arithmetic(EMBEDDED, number) for number in BATCHES}}


def of_0_6b(size: Size) -> Row:
    """Measure the shape of Qwen3-0.6B."""
    with TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "0.6B", **({"num_hidden_layers": 2} if size.quick else {}))
        return speed(model, size) | {"arithmetic": {number: arithmetic(model, number) for number in BATCHES}}


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m8 import on_paper

    return {"embedded": lambda: of_embedded(size), "random_0_6b": lambda: of_0_6b(size), "paper": on_paper.paper}


LESSON = Lesson("m8_parallel", parts, environment=backend, rounds=5)
