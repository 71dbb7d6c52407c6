"""The second process: the first token of a prompt that an earlier process has computed, with its disk and without.

A first process answers the prompt and ends. Then new processes take turns, one round after the other, each for one
request: with the directory, with the directory after the system has dropped its files from memory, and without it.
Each starts, answers a few short requests for a moment, and then the prompt.
"""

import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.engines import Model
from benchmarks.lesson import SEED, Row
from benchmarks.metrics import ttfts_of
from benchmarks.side import SideProcess
from benchmarks.timing import ratio

HOST_BYTES = 2**30
WITHOUT, MEMORY, DISK = "computed", "disk, files in memory", "disk"
SHORT: Row = {"drawn": {"number": 1, "prompts": (4, 4), "outputs": (1, 1), "seed": SEED}}


def restart(model: Model, num_tokens: int, rounds: int, max_model_len: int) -> Row:
    """Measure new processes in turns; the first answer of all is that of the process which wrote the files."""
    with TemporaryDirectory() as folder:
        config = {"model": str(model.directory), "dtype": model.dtype, "load_format": model.load_format}
        settings: Row = {"model": config | {"device": "cpu", "max_model_len": max_model_len, "seed": SEED}}
        tiers = settings | {"cache": {"host_memory_bytes": HOST_BYTES, "disk_path": folder}}
        prompt: Row = {"drawn": {"number": 1, "prompts": (num_tokens,) * 2, "outputs": (1, 1), "seed": SEED}}
        first = started(tiers, prompt)
        sides, found = {WITHOUT: settings, MEMORY: tiers, DISK: tiers}, dict[str, list[Row]]()
        for _ in range(rounds):
            for name, own in sides.items():
                if name == DISK:
                    drop_from_memory(Path(folder))
                found.setdefault(name, []).append(started(own, prompt))
        files = [path.stat().st_size for path in Path(folder).glob("*.safetensors")]
    waits = {name: [run["ttft"] for run in own] for name, own in found.items()}
    return {
        "tokens": num_tokens,
        "rounds": rounds,
        "files": len(files),
        "bytes": sum(files),
        "first_process": first["ttft"],
        "sides": {
            name: {
                "start": statistics.median(run["start"] for run in own),
                "ttft": statistics.median(waits[name]),
                "all_ttfts": waits[name],
                "of_disk": own[-1]["of_disk"],
                "same_answers": sum(run["answers"] == first["answers"] for run in own),
                "times_computed": ratio(waits[WITHOUT], waits[name]),
            }
            for name, own in found.items()
        },
    }


def started(settings: Row, prompt: Row) -> Row:
    """Start a process, answer the prompt once, and end it."""
    began = time.perf_counter()
    spec = {"milestone": "m4", "settings": settings, "threads": torch.get_num_threads()}
    with SideProcess(spec) as side:
        side(dict(SHORT))
        start = time.perf_counter() - began
        run = side(dict(prompt))
    return {
        "start": start,
        "ttft": ttfts_of(run)[0],
        "of_disk": run["counts"].get("num_disk_hit_tokens", 0),
        "answers": run["answers"],
    }


def drop_from_memory(folder: Path) -> None:
    """Write the files to the disk, and let the system drop them from its memory."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
