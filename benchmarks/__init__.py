"""Measurements behind the numbers in the docs: `python -m benchmarks.<milestone>` measures, writes JSON, tables, plots.

What all of them share stands here: where a number was measured, and how two sides are compared fairly.
"""

import hashlib
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ASSETS = Path(__file__).parent.parent / "docs" / "assets"


def environment(*, model: Path, seed: int) -> dict[str, Any]:
    """Machine, versions, model and seed: what every number must carry."""
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
            "sha256": hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
        },
        "seed": seed,
    }


def describe(env: Mapping[str, Any]) -> str:
    """An environment in one sentence, to stand below a table."""
    machine, versions = env["machine"], env["versions"]
    return (
        f"{env['model']['name']} on {machine['cpu']}, {machine['torch_threads']} of {machine['cores']} cores, "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"seed {env['seed']}."
    )


def interleaved(sides: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, float]:
    """Median seconds of each side; each call measures once and returns seconds.

    The sides take turns, so that a machine that gets slower slows all of them; the first round only warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            measured = call()
            if number > 0:
                seconds[name].append(measured)
    return {name: statistics.median(values) for name, values in seconds.items()}


def markdown_table(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """A table for the docs: a column is its heading and what it says of a row. All but the first stand on the right."""
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
