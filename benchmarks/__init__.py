"""All measurements of the project, as one program: `python -m benchmarks` lists its commands.

`run` compares two engines for a reader who has changed one of them. A command per milestone measures the figures of its
lesson; code that only one lesson needs is in the folder of its milestone. This module imports no milestone, so that a
process can measure the packages of another checkout (`side.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "benchmarks" / "results"
ASSETS = HERE / "docs" / "assets"
OUTPUT = Path("benchmark-results")
"""Default folder of everything that a command writes, below the current one. Git ignores it."""
PACKAGES = {
    "m1": "m1_single_request",
    "m2": "m2_continuous_batching",
    "m3": "m3_paged_attention",
    "m4": "m4_radix_cache",
    "m5": "m5_chunked_prefill_spec",
    "m6": "m6_multimodal_pd",
}

Row = dict[str, Any]
"""A row of a table, or a part of a results file, as plain data."""


class BenchmarkError(Exception):
    """An argument, a file or a part that cannot be measured."""


def check_positive(arguments: Mapping[str, Any], *names: str) -> None:
    """Raise `BenchmarkError` for an argument that is not greater than 0; None is one that was not given."""
    for name in names:
        if arguments[name] is not None and not arguments[name] > 0:
            raise BenchmarkError(f"--{name} {arguments[name]} must be greater than 0")
