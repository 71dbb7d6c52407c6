"""The machine under a measurement: name, versions, memory bandwidth, arithmetic, and the load of other processes.

Every figure about the machine in every lesson is measured here: bandwidth by `read_bandwidth`, arithmetic by
`peak_flops`.
"""

import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

READ_BYTES = 2**30  # far larger than any cache
MATRIX_SIZES = (1024, 2048)
DISTURBED_CORES = 0.1
"""Load of other processes, in cores, from which on a measurement is marked."""


def environment(*, model: Path, seed: int) -> dict[str, Any]:
    """Return machine, versions, model and seed: the data that belong to every number."""
    weights = model / "model.safetensors"
    return {
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers")},
        "model": {
            "name": model.name,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None,
        },
        "seed": seed,
    }


def commit_of(checkout: Path) -> str:
    """Return the short hash of a checkout's commit, or `unknown`."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    return "unknown"


def _cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


# --- what it can do ---------------------------------------------------------------------------------------------------


@cache
def reader() -> Callable[[], Tensor]:
    """Return the fastest of torch's reductions over 1 GiB of float32, with as many threads as torch has."""
    large = torch.ones(READ_BYTES // 4)
    ways = [large.sum, large.amax, lambda: torch.linalg.vector_norm(large)]
    return min(ways, key=best_seconds)


def read_bandwidth() -> float:
    """Return bytes per second of reading memory: 1 GiB, the fastest of five reads."""
    return READ_BYTES / best_seconds(reader())


def peak_flops(dtype: torch.dtype) -> float:
    """Return operations per second of the fastest matrix product here, plain or packed."""
    from m3_paged_attention.linear import pack

    found = []
    for size in MATRIX_SIZES:
        a, b = torch.randn(2, size, size).to(dtype)
        packed = pack(b)
        ways = [lambda a=a, b=b: a @ b] + ([lambda a=a, packed=packed: packed(a)] if packed else [])
        found += [2 * size**3 / best_seconds(way) for way in ways]
    return max(found)


def best_seconds(call: Callable[[], Any], *, repeats: int = 5) -> float:
    """Return the seconds of the fastest of several calls, after one that warms up."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return min(times[1:])


# --- other processes --------------------------------------------------------------------------------------------------


class LoadMeter:
    """Load of other processes during a `with` block, in cores, time stolen by a virtual machine's host included.

    `other_cores` is None where /proc does not exist. Processes that this one has started, and theirs, count as its own.
    """

    other_cores: float | None = None

    def __enter__(self) -> Self:
        self._wall, self._own, self._busy = time.perf_counter(), own_seconds(), _busy_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, own, busy = time.perf_counter() - self._wall, own_seconds() - self._own, _busy_seconds()
        if self._busy is not None and busy is not None:
            self.other_cores = max(0.0, (busy - self._busy - own) / self.seconds)

    def report(self) -> dict[str, Any]:
        """Return duration and load as plain data, for a results file."""
        disturbed = None if self.other_cores is None else self.other_cores > DISTURBED_CORES
        return {"seconds": self.seconds, "other_cores": self.other_cores, "disturbed": disturbed}


def own_seconds() -> float:
    """Return the seconds that this process and all that it started have worked, those that have ended included."""
    ticks: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            ticks[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))  # parent; own, ended children's
    family = [os.getpid()]
    for pid in family:  # grows on the way
        family += [child for child, (parent, _) in ticks.items() if parent == pid]
    return sum(ticks[pid][1] for pid in family if pid in ticks) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float | None:
    """Return the seconds that all cores have worked, or were not available because the host had other work."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
