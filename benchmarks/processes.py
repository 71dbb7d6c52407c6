"""Processes and segments of shared memory that belong to engines, for the commands that kill them (Linux)."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from m6_multimodal_pd.disaggregation.runtime.shared_memory import segment_directory


def processes(belongs: Callable[[Path], bool]) -> list[int]:
    """Return the ids of the processes whose folder in /proc belongs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if belongs(folder):
                found.append(int(folder.name))
    return sorted(found)


def children() -> list[int]:
    """Return the processes whose parent is this one, those that have ended left out."""

    def is_child(folder: Path) -> bool:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == os.getpid() and fields[0] != "Z"

    return processes(is_child)


def segments(group: str = "") -> set[str]:
    """Return the names of the segments of shared memory of all engines, or of one group."""
    return {name for name in os.listdir(segment_directory()) if name.startswith(f"stepwise-{group}")}
