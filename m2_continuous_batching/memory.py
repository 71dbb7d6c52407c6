"""How much memory a cache may take, asked before anything is reserved: too much is an error then, and no dead process.

New in m2, whose dense cache is reserved at once; m3's blocks ask the same question. On Linux a process that takes more
than there is gets killed, and the limit of a container counts as much as the machine's memory. vLLM measures free CUDA
memory in `v1/worker/gpu_worker.py`, SGLang in `get_available_gpu_memory`.
"""

from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be reserved on `device`, a tenth of what is free left over; None if the system does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, of what was freed
        return (int(torch.cuda.mem_get_info(device)[0]) + kept) * 9 // 10
    found = [found for found in (_free_in_system(), _free_in_cgroup()) if found is not None]
    return min(found) * 9 // 10 if found else None


def _free_in_system() -> int | None:
    """Linux's own estimate of what can be taken without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _free_in_cgroup() -> int | None:
    """What the limit of a container leaves."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit != "max" else None
