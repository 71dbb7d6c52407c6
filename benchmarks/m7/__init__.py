"""The measurements of lesson 7: streams through HTTP beside the engine alone, slow readers, and llama.cpp's server."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import OUTPUT
from benchmarks.engines import SEEING_MODEL
from benchmarks.lesson import Lesson, Parts, Row, Size


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.m7 import llama_server, measures, slow_readers

    def on_0_6b(measure: Callable[[Path], Row]) -> Row:
        with TemporaryDirectory() as folder:
            return measure(measures.large_model(Path(folder) / "0.6B", quick=size.quick))

    def beside_slow_readers(model: Path) -> Row:
        number, large = (6, (1, 20)) if size.quick else (100, (2, 900))
        return slow_readers.slow_readers(model, 8 if size.quick else 64, size.rounds, number=number, large=large)

    def beside_llama_server() -> Row:
        if size.quick:
            return {"reason": "it is measured with a whole model only"}
        return llama_server.beside_llama_server(OUTPUT / "models", 48, size.rounds)

    return {
        "embedded": lambda: measures.streams(None, 16 if size.quick else 256, size.rounds),
        "random_0_6b": lambda: on_0_6b(lambda model: measures.streams(model, 4 if size.quick else 48, size.rounds)),
        "slow_readers": lambda: on_0_6b(beside_slow_readers),
        "llama_server": beside_llama_server,
    }


def is_fine(parts: Mapping[str, Any]) -> bool:
    """Return whether no token was lost in what was measured."""
    return all("reason" in part or part["complete"] for part in parts.values())


LESSON = Lesson("m7_serving", parts, model=SEEING_MODEL, is_fine=is_fine)
