"""Giving up in a batch: while waiting, in the prefill, in a decode, at every moment of a step.

An abort only marks; the step's update ends the request, and its slot is free for the next step. It is reported exactly
once, and nobody else in the batch notices.
"""

from typing import Any

import pytest

from m2_continuous_batching import LLMEngine
from tests.m2_continuous_batching.engines import (
    MakeEngine,
    OnEvent,
    Recorder,
    check_drained,
    check_step,
    greedy,
    held,
    limits,
    run,
)

PROMPTS = {"a": [21, 22, 23], "b": [31, 32, 33, 34], "c": [41], "d": [51, 52]}


@pytest.fixture
def expected(make_m1: Any) -> dict[str, tuple[int, ...]]:
    """Nine tokens for everybody."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(9)).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: LLMEngine) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(9), request_id=rid)


def ends(last: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {rid: (output.finish_reason, len(output.token_ids)) for rid, output in sorted(last.items())}


def test_a_waiting_request_ends_with_the_next_step_and_the_others_run(make_engine: MakeEngine, execution: str) -> None:
    engine = make_engine(**limits(2, execution=execution))
    submit(engine)
    engine.step()
    assert engine.abort_request("c")
    outputs = engine.step()
    assert outputs.keys() == {"a", "b", "c"}
    assert outputs["c"].finish_reason == "abort" and outputs["c"].token_ids == ()
    assert outputs["c"].metrics.first_token_time is None
    assert len(outputs["a"].token_ids) == len(outputs["b"].token_ids) == 2, "nobody lost a step"
    assert ends(outputs | run(engine)) == {
        "a": ("length", 9),
        "b": ("length", 9),
        "c": ("abort", 0),
        "d": ("length", 9),
    }


def test_the_last_waiting_request_ends_in_a_step_that_runs_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS["a"], greedy(9), request_id="a")
    engine.abort_request("a")
    recorder = Recorder(engine.tracer)
    assert ends(engine.step()) == {"a": ("abort", 0)}
    assert recorder.kinds() == ["finish", "step_done"]
    check_drained(engine)


@pytest.mark.parametrize(
    ("kind", "nth", "kept", "steps"),
    [
        ("admit", 1, 0, 1),  # running, but before its prefill
        ("batch", 1, 0, 1),  # between schedule and update: the first token is dropped
        ("sampled", 1, 0, 1),
        ("batch", 4, 3, 4),  # in a decode
        ("sampled", 4, 3, 4),
        ("result", 4, 4, 4),  # the token was committed before
        ("step_done", 4, 4, 5),
    ],
)
def test_an_abort_within_a_step_takes_effect_at_its_update(
    make_engine: MakeEngine,
    execution: str,
    expected: dict[str, tuple[int, ...]],
    kind: str,
    nth: int,
    kept: int,
    steps: int,
) -> None:
    engine = make_engine(**limits(3, execution=execution))
    submit(engine)
    rid = "b" if kind in ("admit", "sampled", "result") else None
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("b"), nth=nth, rid=rid)
    last: dict[str, Any] = {}
    while "b" not in last or not last["b"].finished:
        assert engine.stats().num_steps < 9, "the abort took no effect"
        last |= engine.step()
    check_step(engine)
    assert (reader.result, reader.error) == (True, None)
    assert (last["b"].finish_reason, last["b"].token_ids) == ("abort", expected["b"][:kept])
    assert engine.stats().num_steps == steps
    assert "b" not in engine.engine_core.executor.held_request_ids()
    last |= run(engine)
    assert {rid: output.token_ids for rid, output in last.items()} == expected | {"b": expected["b"][:kept]}
    assert engine.stats().num_finished == {"length": 3, "abort": 1}


def test_the_place_of_an_aborted_request_is_taken_in_the_next_step(make_engine: MakeEngine, execution: str) -> None:
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


def test_all_of_a_batch_can_be_aborted_at_once(make_engine: MakeEngine, execution: str) -> None:
    engine = make_engine(**limits(2, execution=execution))
    submit(engine)
    engine.step()
    assert all(engine.abort_request(rid) for rid in PROMPTS)
    assert not any(engine.abort_request(rid) for rid in PROMPTS)
    assert ends(engine.step()) == {"a": ("abort", 1), "b": ("abort", 1), "c": ("abort", 0), "d": ("abort", 0)}
    check_drained(engine)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"abort": 4}


def test_an_aborted_decode_that_the_budget_left_out_ends_all_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(3, 4))
    engine.add_request([5, 6], greedy(9), request_id="a")
    engine.step()
    for rid in ("long", "longer"):
        engine.add_request([7, 8, 9, 10], greedy(3), request_id=rid)
    recorder = Recorder(engine.tracer)
    engine.step()
    assert recorder.events("left_out")[0].rids == ("a",)
    engine.abort_request("a")
    assert ends(engine.step())["a"] == ("abort", 1)
    check_step(engine)
    assert ends(run(engine)) == {"long": ("length", 3), "longer": ("length", 3)}


def test_a_closed_stream_leaves_the_batch_and_no_other_stream_notices(
    make_engine: MakeEngine, execution: str, expected: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(**limits(2, execution=execution))
    streams = {rid: engine.stream(prompt, greedy(9), request_id=rid) for rid, prompt in PROMPTS.items()}
    next(streams["a"])
    streams["a"].close()
    streams["d"].close()  # it waits
    assert [output.token_ids for output in streams["b"]] == [expected["b"][:n] for n in range(1, 10)]
    *_, last = streams["c"]
    assert last.token_ids == expected["c"]
    check_drained(engine)
    assert engine.stats().num_finished == {"abort": 2, "length": 2}


def test_everything_about_an_abort_is_in_the_trace(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for rid in ("a", "b"):
        engine.add_request(PROMPTS[rid], greedy(9), request_id=rid)
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request("a")
    engine.step()
    engine.step()
    (abort,), (finish,), (free,) = (recorder.events(kind) for kind in ("abort", "finish", "free"))
    assert (abort.rid, abort.state) == ("a", "running")
    assert (finish.rid, finish.reason, finish.out_len) == ("a", "abort", 1)
    assert (free.owner, free.tokens) == ("a", 3)
    assert [(batch.rids, batch.left) for batch in recorder.events("batch")] == [(("b",), ()), (("b",), ("a",))]
    run(engine)
