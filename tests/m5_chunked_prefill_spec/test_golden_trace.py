"""The trace of long prompts among streams, with guesses, on the embedded checkpoint, is the stored one.

The stored trace (`golden/pieces_and_guesses.jsonl`) holds no times and no floats computed by the model. When a change
of the trace is intended, record it again and read the difference before committing it:

    python -m tests.m5_chunked_prefill_spec.test_golden_trace
"""

from pathlib import Path
from typing import Any

import m5_chunked_prefill_spec
from m5_chunked_prefill_spec import CacheConfig, SamplingParams, SchedulerConfig, SpeculativeConfig
from tests.m5_chunked_prefill_spec.engines import COSTS
from tests.support.engines import unfinished
from tests.support.golden import GoldenTrace, writing_engine

PAGE_SIZE, MAX_TOTAL_TOKENS, BUDGET = 4, 140, 24


def record(path: Path) -> None:
    """Steps of 24 tokens, pages of 4; write the stable trace to `path`.

    A text is said again, with guesses that are mostly right; a second one comes in pieces, and a third that draws and
    may not be guessed for; one is aborted between two pieces. Together they outgrow the memory.
    """
    with writing_engine(
        m5_chunked_prefill_spec,
        path,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=BUDGET,
            schedule_conservativeness=0.0,
            target_gap_ms=50.0,
            cost_table=COSTS,
        ),
        cache_config=CacheConfig(page_size=PAGE_SIZE, max_total_tokens=MAX_TOTAL_TOKENS, debug=True),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3),
    ) as engine:

        def ask(rid: str, text: str, max_tokens: int, *, speculate: bool = True, **params: Any) -> None:
            prompt = engine.chat_prompt([{"role": "user", "content": text}])
            given = SamplingParams(max_tokens=max_tokens, **params)
            engine.add_request(prompt, given, request_id=rid, speculate=speculate)

        ask("again", "Repeat this text:\nriver stone forest candle clock window green bird song table", 40)
        for _ in range(6):
            engine.step()
        codes = {"lamp": 2175, "goat": 6706, "kite": 38}
        facts = " ".join(f"The code of {noun} is {code}." for noun, code in codes.items())
        ask("recall", f"{facts} What is the code of goat?", 40, ignore_eos=True)
        ask("drawn", "What is a batch?", 30, temperature=0.9, top_k=20, seed=7, speculate=False, ignore_eos=True)
        ask("gone", f"{facts} {facts} What is the code of kite?", 9)
        engine.step()
        for _ in unfinished(engine):
            engine.step()
            chunked = engine.engine_core.scheduler.chunked_req
            if chunked is not None and chunked.rid == "gone":
                engine.abort_request("gone")
        assert engine.flush_cache()


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "pieces_and_guesses.jsonl", record)


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    by_kind = GOLDEN.by_kind()
    assert by_kind.keys() >= {
        "costs_measured",
        "chunk_cut",
        "batch",
        "verified",
        "rolled_back",
        "admit",
        "not_admitted",
    }
    assert {event["mode"] for event in by_kind["batch"]} == {"extend", "decode", "mixed", "target_verify"}
    assert {event["bound_by"] for event in by_kind["chunk_cut"]} >= {"max_num_batched_tokens"}
    assert {event["rid"] for event in by_kind["verified"]} >= {"again"}
    assert "drawn" not in {event["rid"] for event in by_kind["verified"]}
    outcomes = {(event["accepted"], len(event["drafted"])) for event in by_kind["verified"]}
    assert any(0 < right == drafted for right, drafted in outcomes), "all right"
    assert any(right < drafted for right, drafted in outcomes), "one was wrong"
    assert GOLDEN.ends() == {"again": "stop", "recall": "length", "drawn": "length", "gone": "abort"}


if __name__ == "__main__":
    GOLDEN.record_again()
