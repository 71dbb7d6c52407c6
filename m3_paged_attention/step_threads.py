"""The number of CPU threads of a step: at most as many as cores that no other program uses, and at least one.

The threads of a parallel kernel wait for each other at its end. If another program holds the core of one of them, the
others wait until the system takes that core back, some milliseconds, and a step has hundreds of kernels. Beside one
busy program on two cores, two threads decode far slower than one (`benchmarks/m3_busy.py` measures it). So the system's
account of CPU time is read five times per second, and a step uses as many threads as cores are left.

Tokens and logits do not depend on the number of threads, so this is no scheduling decision, and it may read a clock.
New in this milestone. vLLM and SGLang bind their threads to cores that are reserved for them
(`VLLM_CPU_OMP_THREADS_BIND`, `SGLANG_CPU_OMP_THREADS_BIND`).
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention.events import ThreadsChanged

PERIOD_S = 0.2  # between two looks at the account, which counts in hundredths of a second
TAKEN, FREE = 0.5, 0.25
"""Shares of a core: it is given up when others use more than `TAKEN` of it, and taken back when they use less than
`FREE`. Between the two, nothing changes."""


class CPUTimes(NamedTuple):
    """Seconds of CPU time so far."""

    busy: float
    """Used by any program, on the cores that this process may use."""
    own: float
    """Used by all threads of this process."""


class StepThreads:
    """Limits torch's number of threads while a step runs: `with step_threads: ...`.

    The caller's own setting (`torch.set_num_threads`, `OMP_NUM_THREADS`) is the upper bound of each step and is back
    after it.
    """

    def __init__(
        self,
        *,
        tracer: Tracer,
        num_cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_times: Callable[[], CPUTimes | None] | None = None,
    ) -> None:
        """`num_cores`: that this process may use. `cpu_times`: None from a system without such an account, on which
        each step has all threads of its caller."""
        self._tracer, self._clock, self._cpu_times = tracer, clock, cpu_times or read_cpu_times
        self._num_cores = num_cores or len(_usable_cores())
        self._num_left = self._num_cores  # cores that others do not use
        self._other_cores = 0.0
        self._then, self._before = clock(), self._cpu_times()
        self._last: tuple[int, int] | None = None  # threads of the last step, and cores that were left then
        self._lowered: tuple[int, int] | None = None  # the caller's number and the step's, where they differ

    def choose(self, limit: int) -> int:
        """The number of threads of the next step, 1 to `limit`."""
        if limit > 1 and self._clock() - self._then >= PERIOD_S:
            self._look()
        return limit if self._before is None else max(1, min(limit, self._num_left))

    def __enter__(self) -> None:
        self.__exit__()  # a step that was interrupted may have left the number lowered
        limit = torch.get_num_threads()
        number = self.choose(limit)
        if number < limit:
            self._lowered = limit, number
            torch.set_num_threads(number)
        last, left = self._last or (limit, self._num_left)
        if self._tracer and number != last and (number < limit or left != self._num_left):  # not the caller's doing
            cores, others = self._num_cores, round(self._other_cores, 2)
            self._tracer.emit(ThreadsChanged(num_threads=number, limit=limit, num_cores=cores, other_cores=others))
        self._last = number, self._num_left

    def __exit__(self, *_: object) -> None:
        if self._lowered is not None:
            limit, number = self._lowered
            if torch.get_num_threads() == number:
                torch.set_num_threads(limit)
            self._lowered = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Restore the caller's number of threads inside a step: for products of torch, whose last bits depend on
        the number of threads."""
        lowered = self._lowered
        self.__exit__()
        try:
            yield
        finally:
            if lowered is not None:
                self._lowered = lowered
                torch.set_num_threads(lowered[1])

    def _look(self) -> None:
        """Compute from the account how many cores others have used since the last look."""
        now, times = self._clock(), self._cpu_times()
        if times is not None and self._before is not None:
            others = (times.busy - self._before.busy) - (times.own - self._before.own)
            self._other_cores = max(0.0, others / (now - self._then))
            free = self._num_cores - self._other_cores
            self._num_left = max(math.floor(free + FREE), min(self._num_left, math.floor(free + TAKEN)))
        self._then, self._before = now, times


def step_threads(tracer: Tracer, *loaded: Any) -> StepThreads | None:
    """For an engine that runs these models. None if one of them is not computed by the native kernels alone: products
    of torch may depend on the number of threads."""
    models = [each.model for each in loaded if each is not None]
    if all(model.backend.name == "native" and model.backend.computes(model.config, model.dtype) for model in models):
        return StepThreads(tracer=tracer)
    return None


def read_cpu_times() -> CPUTimes | None:
    """The account that Linux keeps in `/proc/stat`; None on another system."""
    try:
        rows = [line.split() for line in Path("/proc/stat").read_text().split("\n") if line.startswith("cpu")]
        cores = {f"cpu{core}" for core in _usable_cores()}
        ticks = sum(int(ticks) for name, *times in rows if name in cores for ticks in times[:3] + times[5:7])
    except (OSError, ValueError):
        return None
    return CPUTimes(ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
