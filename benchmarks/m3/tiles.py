"""Tiles (AMX): products of bfloat16 in the processor's unit for small matrices, beside those of its vectors.

The kernels are compiled twice, with tiles and without. The sides take turns in one process. Linear layers: one thread,
whose own time counts; each call takes the next of twelve layers, so that none is in a cache. Prompts: the attention of
one layer (16 heads, 4 KV heads), with all threads.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import BenchmarkError
from benchmarks.lesson import Lesson, Row, Size
from benchmarks.machine import peak_flops
from benchmarks.timing import ratio

WITHOUT = ("-mno-amx-bf16", "-mno-amx-tile")
SHAPE, NUM_LAYERS = (6144, 1024), 12
"""Output and input features, and the number of such layers that take turns."""
ROWS = (1, 4, 16, 64, 128, 512)
HEADS, KV_HEADS, PAGE = 16, 4, 16
PROMPTS = {"2,048 tokens, heads of 64": (2048, 64), "2,048 tokens, heads of 128": (2048, 128)}


@cache
def backends() -> dict[str, Any]:
    """Return the native backend with vectors alone, and with tiles. Raises `BenchmarkError` if there are none."""
    from m3_paged_attention.attention import native_backend, native_library

    about = Path("/proc/cpuinfo")  # of Linux, as the kernels' way to ask for tiles
    if not about.exists() or "amx_bf16" not in about.read_text(encoding="utf-8"):
        raise BenchmarkError("this processor has no tiles (AMX) for bfloat16")
    target = Path(mkdtemp()) / "kernels.so"
    native_library.build(native_library.find_compiler(), target, (*native_library.FLAGS, *WITHOUT))
    library = native_library.open_library(target)
    with patch.object(native_backend, "load", lambda: library):
        vectors = native_backend.NativeBackend()
    return {"vectors": vectors, "tiles": native_backend.NativeBackend()}


def taking_turns(sides: Mapping[str, Callable[[int], Any]], rounds: int, clock: Callable[[], float]) -> Row:
    """Return the median seconds of each side, and how many times as fast tiles are. A side gets the round's number."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            began = clock()
            run(number)
            if number:  # the first round warms up
                seconds[name].append(clock() - began)
    return {
        "seconds": {name: statistics.median(own) for name, own in seconds.items()},
        "times vectors": ratio(seconds["vectors"], seconds["tiles"]),
    }


def layers(size: Size) -> Row:
    """Measure a linear layer for each number of rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weight, rows = torch.randn(SHAPE).bfloat16(), []
    linears = {name: [own.linear(weight) for _ in range(NUM_LAYERS)] for name, own in backends().items()}
    for count in ROWS:
        hidden = torch.randn(count, SHAPE[1]).bfloat16()
        sides = {name: lambda n, own=own, x=hidden: own[n % NUM_LAYERS](x) for name, own in linears.items()}
        found = taking_turns(sides, 2 if size.quick else 40 * size.rounds, time.thread_time)
        rows.append({"rows": count, "weights": weight.numel()} | found)
    peak = peak_flops(torch.bfloat16)
    torch.set_num_threads(threads)
    return {"rows": rows, "peak": peak}


def prompts(size: Size) -> Row:
    """Measure the attention of whole prompts."""
    rows = []
    for name, (length, dim) in PROMPTS.items():
        length = 64 if size.quick else length
        step = _prompt(length, dim)
        sides = {
            side: lambda n, own=own, step=step, scale=dim**-0.5: own.attention(*step, scale)
            for side, own in backends().items()
        }
        flop = 4 * HEADS * dim * length * (length + 1) / 2
        found = taking_turns(sides, 2 if size.quick else 8 * size.rounds, time.perf_counter)
        rows.append({"prompt": name, "flop": flop} | found)
    return {"rows": rows}


def _prompt(length: int, dim: int) -> tuple[Any, Any, Any]:
    """Return queries, keys and values, and the metadata of one prompt."""
    from m3_paged_attention.attention.metadata import AttentionMetadata
    from m3_paged_attention.kv_storage import KVLayer

    num_pages = length // PAGE
    query = torch.randn(length, HEADS, dim).bfloat16()
    layer = KVLayer(*(torch.randn(num_pages, PAGE, KV_HEADS, dim).bfloat16() for _ in range(2)))
    slots = np.arange(length)
    tables = np.arange(num_pages, dtype=np.int32)[None]
    return query, layer, AttentionMetadata.build((length,), (0,), tables, slots)


LESSON = Lesson(
    "m3_tiles",
    lambda size: {"layers": partial(layers, size), "prompts": partial(prompts, size)},
    model=Path("single layers, random weights"),
)
