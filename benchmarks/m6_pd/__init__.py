"""The measurements of lesson 6, part 2: prefill and decode apart."""

from typing import Any

from benchmarks import lesson
from benchmarks.lesson import Lesson, Parts, Size


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m6_pd import measures
    from benchmarks.streams import Traffic

    lengths, traffic = (20, 100, 300, 1000), Traffic(num_streams=4, seed=0)
    pages = (1, 4, 16, 64, 256, 1024)
    steps: Any = {"prefills": (16, 64, 256, 512), "batches": (1, 4, 16, 64), "mixed": (16, 256), "context": 128}
    if size.quick:
        lengths, pages = (20, 300), (1, 16, 64)
        traffic = Traffic(num_streams=2, stream_tokens=40, prompt_tokens=200, seed=0)
        steps = {"prefills": (16,), "batches": (1, 4), "mixed": (4, 16), "context": 16}
    return {
        "roofline": lambda: measures.roofline(**steps, quick=size.quick),
        "bytes": lambda: measures.bytes_moved(lengths),
        "bandwidth": lambda: measures.transfer(pages, 20 * size.rounds),
        "overhead": lambda: measures.overhead(lengths, 3 * size.rounds),
        "gaps": lambda: measures.gaps(traffic, size.rounds),
    }


LESSON = Lesson("m6_pd", parts, environment=lesson.backend, threads=1)
