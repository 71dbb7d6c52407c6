"""The trace of two fixed requests on the embedded checkpoint is the stored one, event for event.

The stored trace (`golden/two_requests.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m1_single_request.test_golden_trace
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request import JsonlReader, LLMEngine, ModelConfig, SamplingParams, TraceConfig

GOLDEN = Path(__file__).parent / "golden" / "two_requests.jsonl"
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = SamplingParams(max_tokens=12)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, seed=7, stop="keys and values")


def record(path: Path) -> None:
    """Answer a question twice, greedily and drawn with a stop string, and write the stable trace to `path`."""
    config = ModelConfig(device="cpu", dtype="float32")
    trace = TraceConfig(readers=(JsonlReader(path, stable=True),))
    with LLMEngine(model_config=config, trace_config=trace) as engine:
        engine.chat(QUESTION, GREEDY, request_id="greedy")
        engine.chat(QUESTION, DRAWN, request_id="drawn")


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The events of the two requests, recorded now."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    record(path)
    return events(path)


def test_the_trace_is_the_stored_one(recorded: list[dict[str, Any]]) -> None:
    stored = events(GOLDEN)
    for number, (event, wanted) in enumerate(zip(recorded, stored, strict=False), start=1):
        assert event == wanted, f"event {number}"
    assert len(recorded) == len(stored)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    kinds = {event["event"] for event in events(GOLDEN)}
    assert kinds >= {
        "engine_started",
        "request_added",
        "admit",
        "batch",
        "alloc",
        "sampled",
        "result",
        "text_held",
        "finish",
        "free",
        "step_done",
    }
    ends = {event["rid"]: event["reason"] for event in events(GOLDEN) if event["event"] == "finish"}
    assert ends == {"greedy": "length", "drawn": "stop"}


def test_the_stored_trace_holds_nothing_that_another_machine_would_compute_otherwise() -> None:
    for event in events(GOLDEN):
        assert "time" not in event
        for name, value in event.items():
            # The one float is a function of seed and position in integer arithmetic.
            assert name == "uniform" or not holds_float(value), f"{event['event']}.{name}"


def holds_float(value: Any) -> bool:
    if isinstance(value, list):
        return any(holds_float(entry) for entry in value)
    return isinstance(value, float)


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.parent.mkdir(exist_ok=True)
    record(GOLDEN)
    print(f"{len(events(GOLDEN))} events written to {GOLDEN}")
