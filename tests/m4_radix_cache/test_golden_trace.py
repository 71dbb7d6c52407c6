"""The trace of users of one system prompt in little memory; `tests/events` compares it with the stored one.

The stored trace (`golden/shared_prefixes.jsonl`) holds no times and no floats computed by the model. When a change of
the trace is intended, record it again and read the difference before committing it:

    python -m tests.m4_radix_cache.test_golden_trace
"""

from pathlib import Path
from typing import Any

import m4_radix_cache
from m4_radix_cache import CacheConfig, SamplingParams, SchedulerConfig
from tests.support.engines import unfinished
from tests.support.golden import GoldenTrace, writing_engine

PAGE_SIZE, MAX_TOTAL_TOKENS, BUDGET = 4, 80, 64
SYSTEM = "You answer questions about language models in one short sentence, as plainly as you can."


def record(path: Path) -> None:
    """Seven requests with room for three, 64 tokens a step and 20 pages of 4; write the stable trace to `path`.

    Two share a system prompt: the second is held back, and finds it. Two share the beginning of a short prompt, and
    compute it twice. One has a salt, one draws, one is aborted. All together they outgrow the memory, so there are
    evictions and a retraction. In the end the cache is flushed.
    """
    with writing_engine(
        m4_radix_cache,
        path,
        scheduler_config=SchedulerConfig(
            max_num_seqs=3, max_num_batched_tokens=BUDGET, schedule_policy="lpm", schedule_conservativeness=0.0
        ),
        cache_config=CacheConfig(page_size=PAGE_SIZE, max_total_tokens=MAX_TOTAL_TOKENS, debug=True),
    ) as engine:

        def ask(rid: str, text: str, max_tokens: int, *, system: str = "", options: Any = None, **params: Any) -> None:
            messages = [{"role": "system", "content": system}] if system else []
            prompt = engine.chat_prompt([*messages, {"role": "user", "content": text}])
            params = {"max_tokens": max_tokens, "ignore_eos": True, **params}
            engine.add_request(prompt, SamplingParams(**params), request_id=rid, **(options or {}))

        def finish() -> None:
            for _ in unfinished(engine):
                engine.step()

        ask("first", "What is a KV cache?", 4, system=SYSTEM)
        ask("second", "What is prefill?", 4, system=SYSTEM)
        finish()
        ask("again", "What is prefill?", 6, system=SYSTEM)
        engine.step()
        ask("greedy", "What is a token?", 32)
        ask("drawn", "What is a batch?", 9, temperature=0.9, top_k=20, seed=7)
        ask("salted", "What is a token?", 30, options={"cache_salt": "tenant", "priority": 2})
        ask("gone", "What is a decode step?", 30)
        engine.step()
        engine.abort_request("gone")
        finish()
        assert engine.flush_cache()


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "shared_prefixes.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    by_kind = GOLDEN.by_kind()
    assert by_kind.keys() >= set(
        "engine_started backend_chosen kv_sized request_added request_options policy_order matched admit not_admitted "
        "batch sampled result finish abort retract step_done inserted split locked duplicates_freed released evicted "
        "audit cache_flushed".split()
    )
    assert {event["num_held_back"] for event in by_kind["policy_order"]} == {0, 1}
    assert {event["mode"] for event in by_kind["batch"]} == {"extend", "decode"}
    assert {event["result"] for event in by_kind["admit"]} == {"continue", "no_token"}
    assert {event["delta"] for event in by_kind["locked"]} == {1, -1}
    assert {event["extra_key"] for event in by_kind["inserted"]} == {None, "tenant"}
    assert {event["prefix"] for event in by_kind["admit"]} == {0, 16, 40, 48}
    assert by_kind["split"][0]["lock_ref"] == 1, "a node is split while somebody uses it"
    assert GOLDEN.ends() == {
        **dict.fromkeys(("first", "second", "again", "greedy", "drawn", "salted"), "length"),
        "gone": "abort",
    }
    (retract,) = by_kind["retract"]
    back = [event for event in by_kind["admit"] if event["num_output_tokens"]]
    assert [event["rid"] for event in back] == [retract["rid"]] == ["salted"]


def test_the_stored_budgets_add_up() -> None:
    """Whoever is admitted fits in the memory, and takes whole pages of what the step may compute."""
    for step in GOLDEN.steps("admit", "not_admitted"):
        left = BUDGET
        for admit in step["admit"]:
            assert admit["need"] < admit["rem_total"] <= admit["cur_rem"] <= MAX_TOTAL_TOKENS
            assert admit["rem_input"] == left
            left -= whole_pages(admit["extend"])
        for refused in step["not_admitted"]:
            assert whole_pages(refused["needed"]) >= refused["available"] <= refused["cur_rem"]


def whole_pages(num_tokens: int) -> int:
    """The tokens of the pages that so many tokens fill or begin."""
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE


if __name__ == "__main__":
    GOLDEN.record_again()
