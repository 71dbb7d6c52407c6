"""Bandwidth of the copies from host memory to the device, against plain copies of as many bytes.

The pages lie side by side, as after one prefill, or in random order, as in a memory that was in use for long. Beside
`HostKVPool.load`, from its call until the last layer has arrived, are the same copies without the thread, and one copy
of a single stretch of memory, which is the best case.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.lesson import SEED, Row
from benchmarks.timing import in_turns, ratio, seconds_of
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.host_copies import CopyJob, runs_of
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool

PAGE_SIZE = 16
POOL_BYTES = 2**29
"""Size of each memory: far larger than a processor's caches, as KV is."""
SHAPES = {"embedded, float32": (4, 2, 64, "float32"), "0.6B, bfloat16": (28, 8, 128, "bfloat16")}
"""Layers, KV heads, head_dim and precision of the model."""


def copies(sizes: Sequence[int], rounds: int, pool_bytes: int = POOL_BYTES) -> Row:
    """Measure load-backs of so many pages of each shape, in both orders."""
    return {
        "page_size": PAGE_SIZE,
        "rows": [
            {"shape": shape} | row
            for shape, (layers, heads, head_dim, precision) in SHAPES.items()
            for row in of_shape(
                KVCacheSpec(
                    block_size=PAGE_SIZE,
                    num_layers=layers,
                    num_kv_heads=heads,
                    head_dim=head_dim,
                    dtype=getattr(torch, precision),
                ),
                sizes,
                rounds,
                pool_bytes,
            )
        ],
    }


def of_shape(spec: KVCacheSpec, sizes: Sequence[int], rounds: int, num_bytes: int) -> list[Row]:
    """Return a row for each number of pages and order."""
    most, rng = num_bytes // spec.block_bytes, np.random.default_rng(SEED)
    device = KVStorage(KVCacheConfig(spec=spec, num_blocks=most), device=torch.device("cpu"))
    pool = HostKVPool([device], num_bytes=(most + 1) * spec.block_bytes)
    every = np.arange(1, most + 1)
    pool.write(every, every).wait()
    pool.load(every, every).wait()  # both memories are written once: the first use of memory has its own price
    plain = np.ones((2, most, spec.block_bytes), dtype=np.uint8)

    def stretch(count: int) -> Slots:
        return 1 + rng.integers(most - count) + np.arange(count)

    def scattered(count: int) -> Slots:
        return 1 + rng.permutation(most)[:count]

    orders = {"side by side": stretch, "random": scattered}
    rows = [
        measured(pool, plain, draw, count, rounds) | {"order": order}
        for count in sizes
        for order, draw in orders.items()
    ]
    pool.close()
    return rows


def measured(pool: HostKVPool, plain: Any, draw: Callable[[int], Slots], count: int, rounds: int) -> Row:
    """Measure loads of `count` pages in turns with plain copies. Each copies other pages: none is in a processor's
    cache from the round before."""

    def load() -> float:
        sources, targets = draw(count), draw(count)
        return seconds_of(lambda: pool.load(sources, targets).wait())

    def no_thread() -> float:
        sources, targets = draw(count), draw(count)
        layers = list(zip(pool._host_layers, pool._device_layers, strict=True))
        return seconds_of(lambda: CopyJob("load", layers, runs_of(sources, targets)).copy())

    def best() -> float:
        first = int(draw(count).min()) % (plain.shape[1] - count)
        return seconds_of(lambda: plain[0, first : first + count].__setitem__(..., plain[1, first : first + count]))

    took = in_turns({"load": load, "no_thread": no_thread, "plain": best}, rounds=rounds)
    num_bytes = count * pool.page_bytes
    return {
        "tokens": count * PAGE_SIZE,
        "bytes": num_bytes,
        "seconds": statistics.median(took["load"]),
        "gb_s": {name: num_bytes / statistics.median(seconds) / 1e9 for name, seconds in took.items()},
        "share_of_plain": ratio(took["plain"], took["load"]),
        "share_of_no_thread": ratio(took["no_thread"], took["load"]),
    }
