"""The trace of a crowd in little memory on the embedded checkpoint; `tests/events` compares it with the stored one.

The stored trace (`golden/little_memory.jsonl`) holds no times and no floats computed by the model. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m3_paged_attention.test_golden_trace
"""

from pathlib import Path

import m3_paged_attention
from m3_paged_attention import CacheConfig, SchedulerConfig
from tests.support.engines import unfinished
from tests.support.golden import GoldenTrace, ask, writing_engine


def record(path: Path) -> None:
    """Six requests with room for four, 24 tokens a step and 14 blocks of 4; write the stable trace to `path`.

    One wants three outputs, one draws, one stops at a string; one is aborted while it waits and one while it runs. They
    swap; the host has room for eight blocks, so one request must be computed again.
    """
    block_bytes = 4 * 4096  # of this model
    with writing_engine(
        m3_paged_attention,
        path,
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, preemption_mode="swap"),
        cache_config=CacheConfig(block_size=4, num_blocks=14, swap_space_bytes=8 * block_bytes),
    ) as engine:
        ask(engine, "greedy", "What is a KV cache?", max_tokens=14)
        ask(engine, "three", "What is prefill?", max_tokens=7, n=3, temperature=0.9, seed=3)
        engine.step()
        engine.step()
        ask(engine, "stop", "What is prefill?", max_tokens=20, stop="phase of")
        ask(engine, "drawn", "What is a token?", max_tokens=8, temperature=0.9, top_k=20, seed=7)
        ask(engine, "leaves", "What is a batch?", max_tokens=4)
        ask(engine, "gone", "What is a decode step?", max_tokens=30)
        for number, _ in enumerate(unfinished(engine)):
            if number == 2:
                engine.abort_request("leaves")
            if number == 22:
                engine.abort_request("gone")
            engine.step()


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "little_memory.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    by_kind = GOLDEN.by_kind()
    assert by_kind.keys() >= set(
        "engine_started backend_chosen kv_sized request_added parallel_sampling admit not_admitted batch "
        "blocks_allocated blocks_forked block_copied blocks_freed blocks_swapped preempted blocks_used "
        "sampled result text_held abort finish step_done".split()
    )
    assert {event["mode"] for event in by_kind["batch"]} == {"prefill", "decode", "mixed"}
    assert {event["how"] for event in by_kind["admit"]} == {"prefill", "fork", "swap_in"}
    assert {event["mode"] for event in by_kind["preempted"]} == {"swap", "recompute"}
    assert GOLDEN.ends() == {
        **{"greedy": "length", "three/0": "length", "three/1": "length", "three/2": "length"},
        **{"stop": "stop", "drawn": "length", "leaves": "abort", "gone": "abort"},
    }


def test_the_stored_steps_add_up() -> None:
    """Tokens of a batch and of its step; blocks of the pool; who is admitted and who joins."""
    for step in GOLDEN.steps("admit"):
        if "blocks_used" in step:
            usage = step["blocks_used"]
            assert usage["num_used"] + usage["num_free"] == 14
            assert usage["tokens_held"] <= usage["num_used"] * usage["block_size"]
            assert usage["tokens_held"] == step["step_done"]["kv_tokens"]
        if "batch" not in step:
            continue
        batch, done = step["batch"], step["step_done"]
        assert batch["total_tokens"] == sum(batch["extend_lens"]) == done["num_tokens"] <= 24
        assert [event["rid"] for event in step["admit"] if event["extend"]] == [
            rid for rid in batch["joined"] if rid in {event["rid"] for event in step["admit"]}
        ]


if __name__ == "__main__":
    GOLDEN.record_again()
