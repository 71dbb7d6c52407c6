"""The machine under the measurement: how fast it reads and multiplies, and who else was using it.

A number without these is worth little: decoding cannot be faster than the memory, and a ratio measured while something
else ran may be an accident.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from m3_paged_attention.linear import pack

READ_BYTES = 2**30  # far larger than any cache
MATRIX_SIZES = (1024, 2048)
DISTURBED_CORES = 0.1  # of one core, by others, from which on a run is marked


class LoadMeter:
    """How many cores were taken by others than this process and those it began and ended meanwhile.

    What a virtual machine was not given counts, too.

    Linux only: elsewhere nobody knows, and `other_cores` is None.
    """

    def __enter__(self) -> Self:
        self._wall, self._own, self._busy = time.perf_counter(), _own_seconds(), _busy_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds, own, busy = time.perf_counter() - self._wall, _own_seconds() - self._own, _busy_seconds()
        self.other_cores: float | None = None
        if self._busy is not None and busy is not None:
            self.other_cores = max(0.0, (busy - self._busy - own) / self.seconds)

    def report(self) -> dict[str, Any]:
        """What stands beside a measurement."""
        disturbed = None if self.other_cores is None else self.other_cores > DISTURBED_CORES
        return {"seconds": self.seconds, "other_cores": self.other_cores, "disturbed": disturbed}


def _own_seconds() -> float:
    """Seconds of cores that this process has used, and its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked, or could not because the host had other work. None: nobody says."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Reader:
    """Reads a large tensor as fast as this machine can, with as many threads as torch has."""

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        self.large = torch.ones(num_bytes // 4)
        ways: dict[str, Callable[[], Tensor]] = {
            "sum": self.large.sum,
            "amax": self.large.amax,
            "norm": lambda: torch.linalg.vector_norm(self.large),
        }
        self.way = min(ways, key=lambda name: best_seconds(ways[name]))
        self.read = ways[self.way]
        self.bandwidths: list[float] = []  # bytes per second

    def __call__(self) -> float:
        """Seconds of the fastest of three reads."""
        seconds = best_seconds(self.read, repeats=3)
        self.bandwidths.append(self.large.nbytes / seconds)
        return seconds


def peak_flops(dtype: torch.dtype) -> float:
    """Operations per second of the fastest matrix product that torch has here, plain or packed."""
    found = []
    for size in MATRIX_SIZES:
        a, b = torch.randn(2, size, size).to(dtype)
        packed = pack(b)
        ways = [lambda a=a, b=b: a @ b] + ([lambda a=a, packed=packed: packed(a)] if packed else [])
        found += [2 * size**3 / best_seconds(way) for way in ways]
    return max(found)


def best_seconds(call: Callable[[], Any], *, repeats: int = 5) -> float:
    """The fastest of several calls, after one to warm up."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return min(times[1:])
