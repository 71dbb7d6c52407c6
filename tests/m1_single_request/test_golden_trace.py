"""The trace of two fixed requests on the embedded checkpoint; `tests/events` compares it with the stored one.

The stored trace (`golden/two_requests.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m1_single_request.test_golden_trace
"""

from pathlib import Path

from m1_single_request import JsonlReader, LLMEngine, ModelConfig, SamplingParams, TraceConfig
from tests.support.golden import GoldenTrace

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


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "two_requests.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    kinds = {event["event"] for event in GOLDEN.stored()}
    assert kinds >= set(
        "engine_started request_added admit batch alloc sampled result text_held finish free step_done".split()
    )
    ends = {event["rid"]: event["reason"] for event in GOLDEN.stored() if event["event"] == "finish"}
    assert ends == {"greedy": "length", "drawn": "stop"}


if __name__ == "__main__":
    GOLDEN.record_again()
