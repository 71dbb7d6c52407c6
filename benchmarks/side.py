"""A measured side in a process of its own: an engine of this or another checkout, with the parts of a reader.

The process reads a specification, then a workload per line, and answers each line with one line of JSON. Between its
measurements it waits, so that sides of several processes can take turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, Self

from benchmarks import HERE, BenchmarkError, Row

SPIN = "print(flush=True)\nwhile True: pass"
CLOSE_S = 10.0
SETTLE_S = 0.25
"""Longer than the period in which an engine looks how many cores are free (m3's `StepThreads`)."""


class SideProcess:
    """A process with one engine; calling it measures a workload once."""

    def __init__(self, spec: Row) -> None:
        """Start the process; `spec`: the keywords of `Measured`, and `checkout`, whose packages it runs."""
        checkout, program = str(spec.pop("checkout", HERE)), "from benchmarks.side import main; main()"
        env = os.environ | {"PYTHONPATH": str(HERE), "TOKENIZERS_PARALLELISM": "false"}
        command, pipe = [sys.executable, "-P", "-c", program, checkout], subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, cwd=checkout, stdin=pipe, stdout=pipe, text=True)
        self.is_ready = False
        self._write(spec)

    def __call__(self, request: Row) -> Row:
        """Measure a workload and return the answer. Raises `BenchmarkError` if the side failed."""
        if not self.is_ready:
            self._read()
            self.is_ready = True
        self._write(request)
        return self._read()

    def _write(self, request: Row) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which `_read` reports
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def _read(self) -> Row:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: Row = json.loads(line) if line else {"error": f"the process ended with status {self.process.wait()}"}
        if "error" in found:
            raise BenchmarkError(found["error"])
        return found

    def close(self) -> None:
        """End the process; it closes its engine first, so that the processes of a group end with it."""
        try:
            self.process.communicate(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:  # it measures
            self.process.kill()
            self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- in the process ---------------------------------------------------------------------------------------------------


class Measured:
    """The engine of this process."""

    def __init__(
        self,
        milestone: str,
        settings: Mapping[str, Mapping[str, Any]],
        parts: str | None = None,
        threads: int | None = None,
        beside_busy: bool = False,
        without_kernels: bool = False,
    ) -> None:
        import torch

        from benchmarks.empty_kernels import empty_kernels
        from benchmarks.engines import build, parts_from

        if threads is not None:
            torch.set_num_threads(threads)
        with empty_kernels() if without_kernels else nullcontext():
            self.engine = build(milestone, parts=parts_from(parts) if parts else None, **settings)
        self.beside_busy = beside_busy

    def settle(self) -> None:
        """Run the engine for a moment, if it has threads to choose from. While it waited the other side used the cores,
        which are free now."""
        import torch

        from benchmarks.serving import request_params
        from benchmarks.workloads import Request

        began, params = time.perf_counter(), request_params(self.engine, Request([], max_tokens=4))
        while torch.get_num_threads() > 1 and time.perf_counter() - began < SETTLE_S:
            self.engine.generate([1, 2, 3], params)

    def measure(self, workload: Row) -> Row:
        """Answer a workload once; `drawn`: its arguments, or the arguments of `named`. `times`: number of runs."""
        from benchmarks import workloads
        from benchmarks.machine import LoadMeter
        from benchmarks.serving import serve

        times = workload.pop("times", 1)
        work = workloads.drawn(**workload["drawn"]) if "drawn" in workload else workloads.named(**workload)
        other = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) if self.beside_busy else None
        try:
            if other is not None and other.stdout is not None:
                other.stdout.readline()  # it runs now
            self.settle()
            with LoadMeter() as meter:
                served = [serve(self.engine, work) for _ in range(times)]
        finally:
            if other is not None:
                other.kill()
                other.communicate()
        return {
            "seconds": sum(run.seconds for run in served),
            "arrived": [at for run in served for at in run.arrived],
            "times": [times for run in served for times in run.times],
            "steps": [step for run in served for step in run.steps],
            "counts": served[-1].counts,
            "answers": [tokens for run in served for tokens in run.answers],
            "prompt_tokens": [metrics.num_prompt_tokens for run in served for metrics in run.metrics],
            "cached_tokens": [metrics.cached_tokens for run in served for metrics in run.metrics],
            "load": meter.report(),
        }


def main() -> None:
    """Answer the lines of stdin. Libraries that print write to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, sys.argv[1])  # the milestones come from there; `benchmarks` is imported already
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])  # also those of its engines
    measured: Measured | None = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if measured is None:
                measured, answer = Measured(**request), {}
            else:
                answer = measured.measure(request)
        except Exception as error:
            name = "" if isinstance(error, BenchmarkError) else f"{type(error).__name__}: "
            answer = {"error": f"{name}{error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    if measured is not None:
        measured.engine.close()
