"""What an aborted request leaves to the next one: its slot.

All that every milestone with batches promises about aborts is tested in `tests/engine_contract`.
"""

from m2_continuous_batching import LLMEngine
from tests.m2_continuous_batching.engines import MakeEngine, Recorder, greedy, held, limits, run

PROMPTS = {"a": [21, 22, 23], "b": [31, 32, 33, 34], "c": [41], "d": [51, 52]}


def submit(engine: LLMEngine) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(9), request_id=rid)


def test_the_slot_of_an_aborted_request_is_taken_in_the_next_step(make_engine: MakeEngine, execution: str) -> None:
    engine = make_engine(**limits(2, execution=execution))
    recorder = Recorder(engine.tracer)
    submit(engine)
    engine.step()
    engine.abort_request("a")
    assert held(engine) == 3 + 4, "an abort only marks"
    engine.step()
    assert held(engine) == 4 + 1
    engine.step()
    assert [batch.rids for batch in recorder.events("batch")] == [("a", "b"), ("b",), ("c", "b")]
    assert [admit.block_ids for admit in recorder.events("admit")] == [(0,), (1,), (0,)]
    run(engine)


def test_the_trace_says_what_an_aborted_request_held(make_engine: MakeEngine) -> None:
    engine = make_engine()
    submit(engine)
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request("a")
    engine.step()
    assert [(free.owner, free.tokens) for free in recorder.events("free")] == [("a", 3)]
    run(engine)
