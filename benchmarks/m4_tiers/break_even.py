"""The length from which a tier is faster than computing: the time to a first token behind so many cached tokens.

A prompt is a number of cached tokens and 16 others. An engine without tiers computes all of it; the others have the
cached part in host memory only, or on the disk only, and have no thresholds: `least_loaded` and `least_prefetched` are
judged by these numbers. With pages of one token any number can be loaded. The files are in the system's memory, or only
on the disk.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.m4_tiers.restart import drop_from_memory
from benchmarks.timing import in_turns, ratio
from benchmarks.workloads import tokens
from m4_radix_cache import SamplingParams
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache

OWN = 16  # tokens behind the cached ones
KV_TOKENS = 4096
HOST_BYTES = 2**30
COMPUTED, HOST, DISK, COLD = "computed", "host", "disk, files in memory", "disk"
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Loads(HiRadixCache):
    """Loads single tokens."""

    least_loaded = 1


class Prefetches(DiskRadixCache):
    """Reads single pages."""

    least_loaded = least_prefetched = 1


PARTS = {"tiered_cache": Loads, "disk_cache": Prefetches}


def break_even(
    engines: Engines, page_size: int, lengths: Sequence[int], rounds: int, tiers: Sequence[str] = (HOST, DISK, COLD)
) -> Row:
    """Measure each length of the cached part with pages of this size, on all sides in turns."""
    rng, cache = Random(SEED), {"page_size": page_size, "max_total_tokens": KV_TOKENS}
    host: Row = cache | {"host_memory_bytes": HOST_BYTES}
    drawn = {length: [tokens(rng, length) for _ in range(rounds + 1)] for length in lengths}
    with TemporaryDirectory() as folder:
        disk, sides = host | {"disk_path": folder}, {COMPUTED: engines("m4", cache=cache)}
        if DISK in tiers:
            with engines("m4", parts=PARTS, cache=disk) as writer:  # closed, it has written everything
                for prefix in (prefix for own in drawn.values() for prefix in own):
                    writer.generate([*prefix, *tokens(rng, OWN)], ONE)
        for name in tiers:
            sides[name] = engines("m4", parts=PARTS, cache=host if name == HOST else disk | {"disk_bytes": 2**40})
        rows = [of_length(sides, prefixes, Path(folder)) for prefixes in drawn.values()]
    least = {name: least_from([(row["cached"], row["times"][name]) for row in rows]) for name in tiers}
    return {"page_size": page_size, "own": OWN, "rounds": rounds, "rows": rows, "least": least}


def least_from(times: Sequence[tuple[int, float]]) -> int | None:
    """Return the smallest length from which a tier is always faster; None: it is not at the largest one."""
    slower = [place for place, (_, faster) in enumerate(times) if faster <= 1]
    first = max(slower, default=-1) + 1
    return times[first][0] if first < len(times) else None


def of_length(sides: Mapping[str, Any], prefixes: Sequence[list[int]], folder: Path) -> Row:
    """Measure all sides in turns; each round has its own prefix."""
    rng, left = Random(SEED), {name: list(prefixes) for name in sides}

    def call(name: str) -> float:
        if name == COLD:
            drop_from_memory(folder)
        return first_token(name, sides[name], left[name].pop(0), tokens(rng, OWN))

    waits = in_turns({name: partial(call, name) for name in sides}, rounds=len(prefixes) - 1)
    return {
        "cached": len(prefixes[0]),
        "ttft": {name: statistics.median(own) for name, own in waits.items()},
        "times": {name: ratio(waits[COMPUTED], own) for name, own in waits.items()},
    }


def first_token(name: str, engine: Any, prefix: list[int], own: list[int]) -> float:
    """Return the time to the first token behind a prefix that is in one tier only."""
    engine.flush_cache()
    if name == HOST:
        engine.generate([*prefix, own[0] + 1], ONE)
        engine.engine_core.scheduler.tree_cache.evict(KV_TOKENS)
    metrics = engine.generate([*prefix, *own], ONE).metrics
    found, expected = metrics.cached_tokens, 0 if name == COMPUTED else len(prefix)
    assert found == expected, f"{name}: {found} tokens of {expected}"
    return float(metrics.time_to_first_token)
