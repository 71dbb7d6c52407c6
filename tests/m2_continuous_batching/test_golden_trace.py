"""The trace of a small batch on the embedded checkpoint is the stored one, event for event.

The stored trace (`golden/small_batch.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m2_continuous_batching.test_golden_trace
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m2_continuous_batching import JsonlReader, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig

GOLDEN = Path(__file__).parent / "golden" / "small_batch.jsonl"


def record(path: Path) -> None:
    """Five requests with room for three, 18 tokens a step; write the stable trace to `path`.

    One draws, one stops at a string, one is aborted while it waits and one while it runs.
    """
    with LLMEngine(
        model_config=ModelConfig(device="cpu", dtype="float32"),
        scheduler_config=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=18),
        trace_config=TraceConfig(readers=(JsonlReader(path, stable=True),)),
    ) as engine:

        def ask(rid: str, text: str, **params: Any) -> None:
            prompt = engine.chat_prompt([{"role": "user", "content": text}])
            engine.add_request(prompt, SamplingParams(**params), request_id=rid)

        ask("greedy", "What is a KV cache?", max_tokens=9)
        ask("stop", "What is prefill?", max_tokens=20, stop="phase of")
        engine.step()
        engine.step()
        ask("drawn", "What is a token?", max_tokens=4, temperature=0.9, top_k=20, seed=7)
        ask("leaves", "What is a batch?", max_tokens=4)
        ask("gone", "What is a decode step?", max_tokens=20)
        for number in range(12):
            if number == 2:
                engine.abort_request("gone")
            if number == 7:
                engine.abort_request("leaves")
            engine.step()


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The events, recorded now."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    record(path)
    return events(path)


def test_the_trace_is_the_stored_one(recorded: list[dict[str, Any]]) -> None:
    stored = events(GOLDEN)
    for number, (event, wanted) in enumerate(zip(recorded, stored, strict=False), start=1):
        assert event == wanted, f"event {number}"
    assert len(recorded) == len(stored)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    stored = events(GOLDEN)
    assert {event["event"] for event in stored} >= {
        "engine_started",
        "request_added",
        "admit",
        "not_admitted",
        "left_out",
        "batch",
        "forward",
        "kv_usage",
        "sampled",
        "result",
        "text_held",
        "abort",
        "finish",
        "free",
        "step_done",
    }
    assert {event["mode"] for event in stored if event["event"] == "batch"} == {"prefill", "decode", "mixed"}
    assert {event["limit"] for event in stored if event["event"] == "not_admitted"} == {
        "max_num_seqs",
        "max_num_batched_tokens",
    }
    ends = {event["rid"]: event["reason"] for event in stored if event["event"] == "finish"}
    assert ends == {"greedy": "length", "stop": "stop", "drawn": "length", "leaves": "abort", "gone": "abort"}


def test_the_stored_batches_add_up() -> None:
    """Tokens of a batch, of its forwards, of the step: three ways to count the same."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events(GOLDEN):
        step = steps.setdefault(event["step"], {"forward": [], "admit": []})
        if event["event"] in ("forward", "admit"):
            step[event["event"]].append(event)
        else:
            step[event["event"]] = event
    for step in steps.values():
        if "batch" not in step:
            continue
        batch, usage, done = step["batch"], step["kv_usage"], step["step_done"]
        assert batch["total_tokens"] == sum(batch["extend_lens"]) == usage["useful_tokens"] == done["num_tokens"]
        assert usage["useful_tokens"] == sum(forward["useful_tokens"] for forward in step["forward"])
        assert usage["padded_tokens"] == sum(forward["padded_tokens"] for forward in step["forward"])
        assert sum(forward["kv_needed"] for forward in step["forward"]) == sum(batch["seq_lens"])
        assert [event["rid"] for event in step["admit"]] == batch["joined"]
        for forward in step["forward"]:
            places = forward["num_rows"] * forward["width"]
            assert forward["useful_tokens"] + forward["padded_tokens"] == places


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
