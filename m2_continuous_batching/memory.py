"""Available memory for a cache, measured before the cache is allocated.

New in m2, whose dense cache is allocated at once; m3's blocks use the same function. On Linux the kernel kills a
process that exceeds the machine's memory or its container's limit. The check turns that into an error message. vLLM
measures free CUDA memory in `v1/worker/gpu_worker.py`, SGLang in `get_available_gpu_memory`.
"""

from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Return nine tenths of the free bytes on `device`; None if the system does not report them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # in torch's own cache
        return (int(torch.cuda.mem_get_info(device)[0]) + unused) * 9 // 10
    limits = [limit for limit in (_free_in_system(), _free_in_cgroup()) if limit is not None]
    return min(limits) * 9 // 10 if limits else None


def _free_in_system() -> int | None:
    """Return Linux's estimate of the bytes that can be allocated without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _free_in_cgroup() -> int | None:
    """Return the free bytes within the container's memory limit; None without a limit."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit != "max" else None
