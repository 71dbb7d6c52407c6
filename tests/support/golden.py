"""A stored trace: recorded again on every run, and held to be the same, event for event.

It holds no times and no floats computed by the model, so that every machine records the same. Each milestone has one;
its `test_golden_trace.py` holds what is recorded, and what the trace must show.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m1_single_request import JsonlReader, SamplingParams, TraceConfig

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

    def by_kind(self) -> dict[str, list[Any]]:
        """The stored events of each kind."""
        found: dict[str, list[Any]] = defaultdict(list)
        for event in self.stored():
            found[event["event"]].append(event)
        return found

    def ends(self) -> dict[str, str]:
        """Why each request ended."""
        return {event["rid"]: event["reason"] for event in self.by_kind()["finish"]}

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


def writing_engine(package: Any, path: Path, **configs: Any) -> Any:
    """An engine of the embedded checkpoint, on kernels that run everywhere, that writes its stable trace to `path`."""
    backend = {"attention_backend": "torch"} if hasattr(package.ModelConfig, "attention_backend") else {}
    model_config = package.ModelConfig(device="cpu", dtype="float32", **backend)
    trace_config = TraceConfig(readers=(JsonlReader(path, stable=True),))
    return package.LLMEngine(model_config=model_config, trace_config=trace_config, **configs)


def ask(engine: Any, rid: str, text: str, **params: Any) -> None:
    """Queue a question."""
    prompt = engine.chat_prompt([{"role": "user", "content": text}])
    engine.add_request(prompt, SamplingParams(**params), request_id=rid)


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def holds_float(value: Any) -> bool:
    """Whether a float is anywhere in it."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return any(map(holds_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float)
