"""What the trace tests of every milestone share: an engine and all its events, and a Chrome trace read back."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.engines import Recorder


def traced(make_engine: Callable[..., Any], **settings: Any) -> tuple[Any, Recorder]:
    """An engine and all its events after it was built."""
    engine = make_engine(**settings)
    return engine, Recorder(engine.tracer)


def fields(found: Iterable[Any], *names: str) -> list[tuple[Any, ...]]:
    """These fields of each event."""
    return [tuple(getattr(event, name) for name in names) for event in found]


def chrome_bars(path: Path) -> list[tuple[str, int, str]]:
    """The bars of a Chrome trace: the request, the step and what the request did in it."""
    entries = _entries(path)
    lanes = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    return sorted((lanes[e["tid"]], e["args"]["step"], e["name"]) for e in entries if e["ph"] == "X" and e["tid"] != 0)


def chrome_curves(path: Path) -> set[str]:
    """The names of its curves."""
    return {entry["name"] for entry in _entries(path) if entry["ph"] == "C"}


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return entries
