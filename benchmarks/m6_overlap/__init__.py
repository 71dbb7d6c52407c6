"""The measurements of lesson 6, part 3: overlapped steps beside the normal order."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.engines import EMBEDDED, Engines
from benchmarks.lesson import Lesson, Parts, Row, Size
from benchmarks.m3 import on_model, on_random_model, shape


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m6_overlap import measures

    batches = (1, 4) if size.quick else (1, 16, 64)

    def of(num_steps: int, rounds: int) -> Callable[[Engines], Row]:
        return lambda engines: measures.steps(engines, batches, num_steps, rounds)

    few, many = (of(4, 1), of(8, 1)) if size.quick else (of(5, max(1, size.rounds // 2)), of(100, size.rounds))
    return {
        "embedded": lambda: on_model(many, EMBEDDED),
        "random_0_6b": lambda: on_random_model(few, size.quick),
    }


def is_fine(parts: Mapping[str, Any]) -> bool:
    """Return whether all ways gave the same tokens."""
    return all(row["same_tokens"] for part in parts.values() for row in part["rows"])


LESSON = Lesson("m6_overlap", parts, environment=shape, rounds=8, threads=1, is_fine=is_fine)
