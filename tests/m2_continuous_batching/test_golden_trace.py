"""The trace of a small batch on the embedded checkpoint; `tests/events` compares it with the stored one.

The stored trace (`golden/small_batch.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m2_continuous_batching.test_golden_trace
"""

from pathlib import Path

import m2_continuous_batching
from m2_continuous_batching import SchedulerConfig
from tests.support.golden import GoldenTrace, ask, writing_engine


def record(path: Path) -> None:
    """Five requests with room for three, 18 tokens a step; write the stable trace to `path`.

    One draws, one stops at a string, one is aborted while it waits and one while it runs.
    """
    limits = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=18)
    with writing_engine(m2_continuous_batching, path, scheduler_config=limits) as engine:
        ask(engine, "greedy", "What is a KV cache?", max_tokens=9)
        ask(engine, "stop", "What is prefill?", max_tokens=20, stop="phase of")
        engine.step()
        engine.step()
        ask(engine, "drawn", "What is a token?", max_tokens=4, temperature=0.9, top_k=20, seed=7)
        ask(engine, "leaves", "What is a batch?", max_tokens=4)
        ask(engine, "gone", "What is a decode step?", max_tokens=20)
        for number in range(12):
            if number == 2:
                engine.abort_request("gone")
            if number == 7:
                engine.abort_request("leaves")
            engine.step()


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "small_batch.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    by_kind = GOLDEN.by_kind()
    assert by_kind.keys() >= set(
        "engine_started request_added admit not_admitted left_out batch forward kv_usage sampled result text_held "
        "abort finish free step_done".split()
    )
    assert {event["mode"] for event in by_kind["batch"]} == {"prefill", "decode", "mixed"}
    assert {event["limit"] for event in by_kind["not_admitted"]} == {"max_num_seqs", "max_num_batched_tokens"}
    ends = {"greedy": "length", "stop": "stop", "drawn": "length", "leaves": "abort", "gone": "abort"}
    assert GOLDEN.ends() == ends


def test_the_stored_batches_add_up() -> None:
    """Tokens of a batch, of its forwards, of the step: three ways to count the same."""
    for step in GOLDEN.steps("forward", "admit"):
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


if __name__ == "__main__":
    GOLDEN.record_again()
