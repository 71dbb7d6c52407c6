"""What the trace tests of every milestone share: an engine and all its events, and a Chrome trace read back."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.engines import Recorder, drain, greedy


def traced(make_engine: Callable[..., Any], **settings: Any) -> tuple[Any, Recorder]:
    """An engine and all its events after it was built."""
    engine = make_engine(**settings)
    return engine, Recorder(engine.tracer)


def fields(found: Iterable[Any], *names: str) -> list[tuple[Any, ...]]:
    """These fields of each event."""
    return [tuple(getattr(event, name) for name in names) for event in found]


def order_of_admission(engine: Any, prompts: Iterable[list[int]]) -> list[int]:
    """The numbers of prompts that arrive together, in the order in which they get in."""
    recorder = Recorder(engine.tracer)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(2), request_id=str(number))
    drain(engine)
    return [int(admit.rid) for admit in recorder.events("admit")]


def chrome_bars(path: Path) -> list[tuple[str, int, str]]:
    """The bars of a Chrome trace: the request, the step and what the request did in it."""
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    return sorted(
        (lanes[e["tid"]], e["args"]["step"], e["name"])
        for e in entries
        if e["ph"] == "X" and lanes[e["tid"]] != "engine"
    )


def chrome_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a Chrome trace, each as the format has it, so that Perfetto opens the file."""

    def no_number(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number)
    entries: list[dict[str, Any]] = document["traceEvents"]
    for entry in entries:
        assert entry["ph"] in "MiXC" and isinstance(entry["name"], str), entry
        assert isinstance(entry["pid"], int) and isinstance(entry["tid"], int), entry
        assert entry["ph"] == "M" or entry["ts"] >= 0, entry
        assert entry["ph"] != "X" or entry["dur"] >= 0, entry
        assert entry["ph"] != "i" or entry["s"] == "t", entry
        assert entry["ph"] != "C" or all(isinstance(value, int | float) for value in entry["args"].values()), entry
    lanes = {entry["tid"] for entry in entries if entry["ph"] == "M"}
    assert {entry["tid"] for entry in entries} <= lanes, "every lane has a name"
    return entries
