"""The measurements of lesson 7: streams through HTTP beside the engine alone."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines import SEEING_MODEL
from benchmarks.lesson import Lesson, Parts, Row, Size


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m7 import measures

    def on_0_6b() -> Row:
        with TemporaryDirectory() as folder:
            model = measures.large_model(Path(folder) / "0.6B", quick=size.quick)
            return measures.streams(model, 4 if size.quick else 48, size.rounds)

    return {
        "embedded": lambda: measures.streams(None, 16 if size.quick else 256, size.rounds),
        "random_0_6b": on_0_6b,
    }


def is_fine(parts: Mapping[str, Any]) -> bool:
    """Return whether no token was lost."""
    return all(part["complete"] for part in parts.values())


LESSON = Lesson("m7_serving", parts, model=SEEING_MODEL, is_fine=is_fine)
