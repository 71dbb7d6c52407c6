"""Hit rates of a prefix cache of your own on the recorded day, beside the default one: counted, without a model.

Requests pass one after another, so a number is the same in each run and on each machine. Besides the whole day it
counts twenty pieces of it, each from an empty cache: how far apart they are says how much one piece is worth.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import OUTPUT, BenchmarkError
from benchmarks.engines import parts_from
from benchmarks.lesson import Row
from benchmarks.m4.caches import Server
from benchmarks.m4.eviction import CAPACITIES, PAGE_SIZE, prepared, replay
from benchmarks.m4.traffic import TracedRequest, recorded
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey

PIECES, IN_A_PIECE, PIECE_TOKENS = 20, 120, 16 * 1024
"""As in the workload `day`: a seed is a piece."""


def counted(make: Callable[..., RadixCache], num_requests: int | None = None) -> Row:
    """Count the hit rate of a cache over the day at each capacity, and over each piece."""
    requests = prepared(recorded()[:num_requests])
    pieces = [requests[first : first + IN_A_PIECE] for first in range(0, len(requests), IN_A_PIECE)][:PIECES]

    def rate(num_tokens: int, some: list[tuple[RadixKey, TracedRequest]]) -> float:
        return replay(Server(make, num_tokens=num_tokens, page_size=PAGE_SIZE), some).all

    return {
        "day": {str(size): rate(size, requests) for size in CAPACITIES},
        "pieces": [rate(PIECE_TOKENS, piece) for piece in pieces],
    }


def table(own: Row, default: Row) -> Table:
    """Return the hit rates of both over the whole day."""
    shown = Table(title="found, of all prompt tokens of the day", title_justify="left")
    for heading in ("tokens of memory", "default", "yours", "difference"):
        shown.add_column(heading, justify="right")
    for size, rate in own["day"].items():
        other = default["day"][size]
        shown.add_row(f"{int(size):,}", f"{other:.1%}", f"{rate:.1%}", f"{100 * (rate - other):+.1f}")
    return shown


def conclusion(own: Row, default: Row) -> str:
    """Return how often the own cache wins on a piece, and by how much."""
    gains = [100 * (mine - other) for mine, other in zip(own["pieces"], default["pieces"], strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    least, mean, most = min(gains), statistics.fmean(gains), max(gains)
    return (
        f"{len(gains)} pieces of {IN_A_PIECE} requests, {PIECE_TOKENS:,} tokens of memory: yours finds more in "
        f"{better} and less in {worse}; the difference is {mean:+.1f} points in the mean, from {least:+.1f} to "
        f"{most:+.1f}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print the table, and write JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks day", description=__doc__)
    parser.add_argument("--parts", metavar="FILE.py:NAME", required=True, help="parts with a prefix_cache of your own")
    parser.add_argument("--requests", type=int, help="only the first so many requests of the day")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results; default: ./benchmark-results")
    args = parser.parse_args(argv)
    parts = parts_from(args.parts)
    if "prefix_cache" not in parts:
        raise BenchmarkError(f"{args.parts} has no prefix_cache: nothing of it decides what is found")
    console = Console()
    own, default = (counted(make, args.requests) for make in (parts["prefix_cache"], RadixCache))
    console.print(table(own, default))
    console.print(conclusion(own, default), highlight=False)
    args.output.mkdir(exist_ok=True, parents=True)
    path = args.output / "day.json"
    path.write_text(json.dumps({"yours": own, "default": default}, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {path}", highlight=False)
    return 0
