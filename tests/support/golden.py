"""A stored trace: recorded again on every run, and held to be the same, event for event.

It holds no times and no floats computed by the model, so that every machine records the same. Each milestone has one;
its `test_golden_trace.py` holds what is recorded, and what the trace must show.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

EXACT = {"uniform", "new_token_ratio", "rate"}
"""Floats that every machine computes alike: of seed and position in integer arithmetic, a quotient of counts."""


@dataclass(frozen=True)
class GoldenTrace:
    """The stored trace at `path`, and `record`, which writes the same to another path."""

    path: Path
    record: Callable[[Path], None]

    def stored(self) -> list[dict[str, Any]]:
        """The stored events."""
        return events(self.path)

    def check(self, path: Path) -> None:
        """Record to `path` and fail at the first event that differs."""
        self.record(path)
        recorded, stored = events(path), self.stored()
        for number, (event, wanted) in enumerate(zip(recorded, stored, strict=False), start=1):
            assert event == wanted, f"event {number} is\n{event}\nstored is\n{wanted}"
        assert len(recorded) == len(stored), f"{len(recorded)} events, {len(stored)} are stored"

    def check_portable(self) -> None:
        """Fail if another machine might have computed anything otherwise."""
        for event in self.stored():
            assert "time" not in event, event
            for name, value in event.items():
                assert name in EXACT or not holds_float(value), f"{event['event']}.{name}"

    def steps(self, *several: str) -> list[dict[str, Any]]:
        """The stored events of each step by their kind; a list where the kind is among `several`."""
        steps: dict[int, dict[str, Any]] = {}
        for event in self.stored():
            step, kind = steps.setdefault(event["step"], {name: [] for name in several}), event["event"]
            if kind in several:
                step[kind].append(event)
            else:
                step[kind] = event
        return list(steps.values())

    def record_again(self) -> None:
        """Replace what is stored."""
        torch.set_num_threads(1)
        self.path.parent.mkdir(exist_ok=True)
        self.record(self.path)
        print(f"{len(self.stored())} events written to {self.path}")


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def holds_float(value: Any) -> bool:
    """Whether a float is anywhere in it."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return any(map(holds_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float)
