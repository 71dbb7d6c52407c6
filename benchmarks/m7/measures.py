"""Sixteen streams at once: of the engine alone, and of the server with two kinds of client.

Each side is a process that waits while the others are measured. `raw` reads the bytes of its sockets and parses
nothing: it shows what the server costs. `openai` is the official client: what a program in Python sees.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Self

from benchmarks import HERE, BenchmarkError, Row
from benchmarks.engines import SHAPE_0_6B, random_model
from benchmarks.lesson import SEED
from benchmarks.machine import LoadMeter
from benchmarks.timing import in_turns

NUM_STREAMS = 16
PROMPT_TOKENS = 32
CLIENTS = ("raw", "openai")
SERVER = ("-m", "m7_serving", "--port", "0")
CLIENT = ("-m", "benchmarks.m7.sides")
DUMMY = ("--dtype", "bfloat16", "--load-format", "dummy")


class Process:
    """A process that answers lines of JSON with lines of JSON."""

    def __init__(self, *command: str) -> None:
        env = os.environ | {"PYTHONPATH": str(HERE), "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, *command], env=env, stdin=pipe, stdout=pipe, text=True)

    def line(self) -> str:
        """Read a line. Raises `BenchmarkError` if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.process.args!r} ended with status {self.process.wait()}")
        return line

    def answer(self, request: Any) -> Row:
        """Send a line, and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        found: Row = json.loads(self.line())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate()


def large_model(folder: Path, *, quick: bool) -> Path:
    """Write a model in the shape of Qwen3-0.6B, whose weights are drawn when it is loaded. `quick`: with two layers."""
    random_model(folder, **({"num_hidden_layers": 2} if quick else {}))
    return with_words(folder)


def with_words(folder: Path) -> Path:
    """Make a word of each token of a large model that its tokenizer lacks: one without text would give no chunk."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    taken = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    more = range(max(taken) + 1, SHAPE_0_6B["vocab_size"])  # type: ignore[call-overload]
    tokenizer["model"]["vocab"] |= {f"\u0120word{number}": number for number in more}
    path.unlink()  # it may be a link
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def prompts(random: Random, number: int = NUM_STREAMS) -> list[list[int]]:
    """Return prompts that are in no cache."""
    return [[random.randrange(256, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(number)]


def streams(model: Path | None, num_tokens: int, rounds: int) -> Row:
    """Measure all sides in turns. `num_tokens`: of each stream; `model`: None for the one that ships."""
    random = Random(SEED)
    flags = [] if model is None else ["--model", str(model), *DUMMY]
    settings = {} if model is None else {"model": str(model), "dtype": "bfloat16", "load_format": "dummy"}

    with ExitStack() as stack, LoadMeter() as meter:
        start = lambda *command: stack.enter_context(Process(*command))  # noqa: E731
        server = start(*SERVER, *flags)
        url = server.line().split()[-1]
        alone = start(*CLIENT, "engine", json.dumps(settings))
        clients = {name: start(*CLIENT, name, url) for name in CLIENTS}
        watched = {"front": server.process.pid, "engine": engine_of(server.process.pid)}

        def through_http(client: Process) -> Row:
            before = {name: cpu_seconds(pid) for name, pid in watched.items()}
            found = client.answer([prompts(random), num_tokens])
            found["cpu"] |= {name: cpu_seconds(pid) - before[name] for name, pid in watched.items()}
            return found

        sides: dict[str, Any] = {"engine": lambda: alone.answer([prompts(random), num_tokens])}
        sides |= {name: (lambda client=client: through_http(client)) for name, client in clients.items()}
        found = in_turns(sides, rounds=rounds)
    cpu = {name: summed([run["cpu"] for run in runs]) for name, runs in found.items()}
    return row_of(found, num_tokens, meter) | {"cpu": cpu}


def in_turns_of(
    clients: Mapping[str, Process], random: Random, num_tokens: int, rounds: int, *, number: int = NUM_STREAMS
) -> dict[str, list[Row]]:
    """Let clients that have the same kind take turns with `number` streams each; return the runs of each."""

    def run(client: Process) -> Row:
        return client.answer([prompts(random, number), num_tokens])

    return in_turns({name: partial(run, client) for name, client in clients.items()}, rounds=rounds)


def row_of(found: Mapping[str, list[Row]], num_tokens: int, meter: LoadMeter) -> Row:
    """Return the numbers of sixteen streams of several sides."""
    return {
        "num_tokens": num_tokens,
        "streams": NUM_STREAMS,
        "complete": all(run["num_tokens"] == num_tokens * NUM_STREAMS for runs in found.values() for run in runs),
        "seconds": {name: [run["seconds"] for run in runs] for name, runs in found.items()},
        "gaps": {name: [statistics.median(gaps_of(run)) for run in runs] for name, runs in found.items()},
        "load": meter.report(),
    }


def gaps_of(run: Row) -> list[float]:
    """Return the seconds between two chunks of a stream, of all streams."""
    return [after - before for times in run["times"] for before, after in pairwise(times)]


def summed(runs: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the median CPU seconds of each process."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def engine_of(pid: int) -> int:
    """Return the process of the engine that a server has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    (engine,) = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return engine


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process has worked."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
