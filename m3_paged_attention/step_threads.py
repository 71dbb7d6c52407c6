"""The number of CPU threads of a step: at most the number of cores that no other program uses, and at least one.

The threads of a parallel kernel wait for each other at its end. If another program runs on the core of one thread, all
others wait some milliseconds until the system reschedules that thread, and a step has hundreds of kernels. Beside one
busy program on two cores, two threads decode far slower than one (`benchmarks/m3/busy.py` measures it). So the system's
CPU times are read five times per second, and a step uses one thread per unused core.

Tokens and logits do not depend on the number of threads, so this is not a scheduling decision, and may use a clock.
New in this milestone. vLLM and SGLang bind their threads to cores that are reserved for them
(`VLLM_CPU_OMP_THREADS_BIND`, `SGLANG_CPU_OMP_THREADS_BIND`).
"""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention.events import ThreadsChanged

PERIOD_S = 0.2  # between two reads of the CPU times, whose unit is a hundredth of a second
FIRST_PERIOD_S = 0.05  # until the first read after a pause: many requests take no longer
IDLE_S = 1.0  # after a longer pause, what others used meanwhile does not predict what they use during the next step
TAKEN, FREE = 0.5, 0.25
"""Fractions of a core: the engine stops using a core when others use more than `TAKEN` of it, and uses it again when
others use less than `FREE`. Between the two, nothing changes."""


class CPUTimes(NamedTuple):
    """CPU time so far, in seconds."""

    busy: float
    """Time of all programs, on the cores that this process may use."""
    own: float
    """Time of all threads of this process."""


class StepThreads:
    """Limits torch's number of threads while a step runs: `with step_threads: ...`.

    The caller's own setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) is the upper bound of each step and is
    restored after it.
    """

    def __init__(
        self,
        *,
        tracer: Tracer,
        num_cores: int,
        clock: Callable[[], float],
        cpu_times: Callable[[], CPUTimes | None],
    ) -> None:
        """`num_cores`: cores that this process may use. `clock` returns monotonic seconds. `cpu_times` returns None on
        a system without CPU times; then each step has all threads of its caller."""
        self._tracer, self._clock, self._cpu_times = tracer, clock, cpu_times
        self._num_cores = num_cores
        self._num_left = self._num_cores  # cores that others do not use
        self._other_cores = 0.0
        self._ended_at = clock()  # the last step
        self._read_at, self._read = self._ended_at, self._cpu_times()  # time and result of the last read
        self._period_s = PERIOD_S
        self._last: tuple[int, int] | None = None  # threads of the last step, and unused cores at that time
        self.lowered: tuple[int, int] | None = None
        """The caller's number of threads and that of the step that runs, if they differ."""

    def choose(self, limit: int) -> int:
        """Return the number of threads of the next step, 1 to `limit`."""
        now = self._clock()
        if limit > 1 and now - self._read_at >= self._period_s:
            self._update_cores(now, was_idle=now - self._ended_at > IDLE_S)
        return limit if self._read is None else max(1, min(limit, self._num_left))

    def __enter__(self) -> None:
        limit = torch.get_num_threads()
        number = self.choose(limit)
        if number < limit:
            self.lowered = limit, number
            torch.set_num_threads(number)
        last, left = self._last or (limit, self._num_left)
        if number != last and (number < limit or left != self._num_left):  # not the caller's change
            cores, others = self._num_cores, round(self._other_cores, 2)
            self._tracer.emit(ThreadsChanged, num_threads=number, limit=limit, num_cores=cores, other_cores=others)
        self._last = number, self._num_left

    def __exit__(self, *_: object) -> None:
        if self.lowered is not None:
            limit, number = self.lowered
            if torch.get_num_threads() == number:
                torch.set_num_threads(limit)
            self.lowered = None
        self._ended_at = self._clock()

    def _update_cores(self, now: float, *, was_idle: bool) -> None:
        """Read the CPU times, and compute the number of cores that others have used since the last read.

        After a pause a step has all cores until the next read, which comes soon.
        """
        times = self._cpu_times()
        self._period_s = FIRST_PERIOD_S if was_idle else PERIOD_S
        if was_idle:
            self._num_left = self._num_cores
        elif times is not None and self._read is not None:
            others = (times.busy - self._read.busy) - (times.own - self._read.own)
            self._other_cores = max(0.0, others / (now - self._read_at))
            free = self._num_cores - self._other_cores
            self._num_left = max(math.floor(free + FREE), min(self._num_left, math.floor(free + TAKEN)))
        self._read_at, self._read = now, times


def step_threads(tracer: Tracer, *loaded: Any) -> StepThreads | None:
    """Return the `StepThreads` of an engine with these models, or None.

    None if the native kernels do not compute all products of a model: those of torch may depend on the number of
    threads.
    """
    models = [each.model for each in loaded if each is not None]
    if all(model.backend.name == "native" and model.backend.computes(model.config, model.dtype) for model in models):
        num_cores = len(_usable_cores())
        return StepThreads(tracer=tracer, num_cores=num_cores, clock=time.monotonic, cpu_times=read_cpu_times)
    return None


def read_cpu_times() -> CPUTimes | None:
    """Read the CPU times from Linux's `/proc/stat`; None on another system."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().split("\n") if line.startswith("cpu")]
        cores = {f"cpu{core}" for core in _usable_cores()}
        ticks = sum(int(ticks) for name, *times in rows if name in cores for ticks in times[:3] + times[5:7])
    except (OSError, ValueError):
        return None
    return CPUTimes(ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
