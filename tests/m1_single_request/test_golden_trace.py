"""The trace of two fixed requests on the embedded checkpoint; `tests/events` compares it with the stored one.

The stored trace (`golden/two_requests.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m1_single_request.test_golden_trace
"""

from pathlib import Path

import m1_single_request
from m1_single_request import SamplingParams
from tests.support.golden import GoldenTrace, writing_engine

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = SamplingParams(max_tokens=12)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, seed=7, stop="keys and values")


def record(path: Path) -> None:
    """Answer a question twice, greedily and drawn with a stop string, and write the stable trace to `path`."""
    with writing_engine(m1_single_request, path) as engine:
        engine.chat(QUESTION, GREEDY, request_id="greedy")
        engine.chat(QUESTION, DRAWN, request_id="drawn")


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "two_requests.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    assert GOLDEN.by_kind().keys() >= set(
        "engine_started request_added admit batch alloc sampled result text_held finish free step_done".split()
    )
    assert GOLDEN.ends() == {"greedy": "length", "drawn": "stop"}


if __name__ == "__main__":
    GOLDEN.record_again()
