"""Giving up: while waiting, in the prefill, in a decode, at every moment of a step.

An abort only marks; the step's update ends the request, and its memory is free for the next step. It is reported
exactly once, and the other requests lose nothing.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine_contract.crowd import Answers, MakeEngine, ends, note, run
from tests.engine_contract.variants import M1, WHOLE, WITH_M1, Variant, each_of
from tests.support.engines import OnEvent, Recorder, greedy

pytestmark = pytest.mark.sample(3)

PROMPTS = {"b": [31, 32, 33, 34], "a": [21, 22, 23], "c": [41], "d": [51, 52]}


variant = each_of(WITH_M1)
"""Every milestone, in each of its ways to run."""


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """Nine tokens for each."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(9)).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: Any) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(9), request_id=rid)


def test_a_waiting_request_ends_with_the_next_step_and_the_others_run(
    variant: Variant, make_engine: MakeEngine
) -> None:
    engine = make_engine(seats=2)
    submit(engine)
    running = engine.step().keys()
    assert engine.abort_request("c") and engine.has_unfinished_requests()
    outputs = engine.step()
    assert outputs.keys() == {*running, "c"}
    assert outputs["c"].finish_reason == "abort" and outputs["c"].token_ids == ()
    assert outputs["c"].metrics.first_token_time is None
    assert all(len(outputs[rid].token_ids) == 2 for rid in running), "none lost a step"
    note(outputs, run(variant, engine))
    assert ends(outputs) == {"a": ("length", 9), "b": ("length", 9), "c": ("abort", 0), "d": ("length", 9)}


def test_the_last_waiting_request_ends_in_a_step_that_runs_nothing(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS["a"], greedy(9), request_id="a")
    engine.abort_request("a")
    recorder = Recorder(engine.tracer)
    assert ends(engine.step()) == {"a": ("abort", 0)}
    assert not {"admit", "batch", "sampled", "result"} & set(recorder.kinds())
    assert [kind for kind in recorder.kinds() if kind in ("finish", "step_done")] == ["finish", "step_done"]
    variant.check_drained(engine)


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
    variant: Variant, make_engine: MakeEngine, expected: Answers, kind: str, nth: int, kept: int, steps: int
) -> None:
    engine = make_engine(seats=3)
    submit(engine)
    rid = "b" if kind in ("admit", "sampled", "result") else None
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("b"), nth=nth, rid=rid)
    last: dict[str, Any] = {}
    while "b" not in last or not last["b"].finished:
        assert engine.stats().num_steps < 9, "the abort took no effect"
        note(last, engine.step())
    variant.check_step(engine)
    assert (reader.result, reader.error) == (True, None)
    assert (last["b"].finish_reason, last["b"].token_ids) == ("abort", expected["b"][:kept])
    assert engine.stats().num_steps == steps
    assert "b" not in variant.owners(engine)
    note(last, run(variant, engine))
    assert {rid: output.token_ids for rid, output in last.items()} == expected | {"b": expected["b"][:kept]}
    assert engine.stats().num_finished == {"length": 3, "abort": 1}
    assert engine.stats().num_output_tokens == 3 * 9 + kept, "dropped tokens are not counted"


@pytest.mark.parametrize("ends_by", ["length", "stop"])
def test_an_abort_that_was_accepted_is_not_overwritten_by_a_stop(
    variant: Variant, make_engine: MakeEngine, expected: Answers, ends_by: str
) -> None:
    """It comes while the token is judged that ends the request, as from a signal handler."""
    first, second, third, *_ = expected["d"]
    assert third not in (first, second)
    accepted = []

    class Aborting(variant.part("stop_checker")):  # type: ignore[misc]
        def check(self, sequence: Any, new_token_ids: Sequence[int]) -> Any:
            verdict = super().check(sequence, new_token_ids)
            if verdict.finish_reason is not None:
                accepted.append(engine.abort_request("d"))
            return verdict

    engine = make_engine({"stop_checker": Aborting}, seats=3)
    params = greedy(3) if ends_by == "length" else greedy(9, stop_token_ids=[third])
    engine.add_request(PROMPTS["d"], params, request_id="d")
    output = run(variant, engine)["d"]
    assert accepted == [True]
    assert (output.finish_reason, output.token_ids) == ("abort", (first, second, third))
    assert engine.stats().num_finished == {"abort": 1}


def test_what_an_aborted_request_holds_is_free_after_the_update_and_not_before(
    variant: Variant, make_engine: MakeEngine
) -> None:
    engine = make_engine(seats=2)
    submit(engine)
    engine.step()
    owners = set(variant.owners(engine))
    assert "b" in owners and engine.abort_request("b")
    assert set(variant.owners(engine)) == owners, "an abort only marks"
    at_work = OnEvent(engine.tracer, "batch", lambda: set(variant.owners(engine)))
    engine.step()
    assert at_work.result == (None if variant is M1 else owners), "the step may be reading it"
    assert set(variant.owners(engine)) == owners - {"b"}
    engine.step()
    assert len(set(variant.owners(engine)) - owners) == 1, "the next in line has its place"
    run(variant, engine)


def test_all_requests_can_be_aborted_at_once(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2)
    submit(engine)
    running = engine.step().keys()
    assert all(engine.abort_request(rid) for rid in PROMPTS)
    assert not any(engine.abort_request(rid) for rid in PROMPTS)
    assert ends(engine.step()) == {rid: ("abort", int(rid in running)) for rid in "abcd"}
    variant.check_drained(engine)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"abort": 4}


@pytest.mark.parametrize("variant", WHOLE, ids=str)
def test_an_aborted_request_for_which_a_step_had_no_token_ends_all_the_same(
    variant: Variant, make_engine: MakeEngine
) -> None:
    engine = make_engine(seats=3, budget=4)
    engine.add_request([5, 6], greedy(9), request_id="a")
    engine.step()
    for rid, prompt in (("long", [7, 8, 9, 10]), ("longer", [17, 18, 19, 20])):
        engine.add_request(prompt, greedy(3), request_id=rid)
    assert engine.step().keys() == {"long"}
    engine.abort_request("a")
    outputs = engine.step()
    assert ends(outputs)["a"] == ("abort", 1)
    variant.check_step(engine)
    note(outputs, run(variant, engine))
    assert ends(outputs) == {"a": ("abort", 1), "long": ("length", 3), "longer": ("length", 3)}


def test_a_closed_stream_leaves_and_the_other_streams_lose_nothing(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    engine = make_engine(seats=2)
    streams = {rid: engine.stream(prompt, greedy(9), request_id=rid) for rid, prompt in PROMPTS.items()}
    next(streams["b"])
    streams["b"].close()
    streams["d"].close()  # it waits
    assert [output.token_ids for output in streams["a"]] == [expected["a"][:n] for n in range(1, 10)]
    *_, last = streams["c"]
    assert last.token_ids == expected["c"]
    variant.check_drained(engine)
    assert engine.stats().num_finished == {"abort": 2, "length": 2}


def test_everything_about_an_abort_is_in_the_trace(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for rid in ("a", "b"):
        engine.add_request(PROMPTS[rid], greedy(9), request_id=rid)
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request("a")
    engine.step()
    (abort,), (finish,) = (recorder.events(kind) for kind in ("abort", "finish"))
    assert (abort.rid, abort.state) == ("a", "running")
    assert (finish.rid, finish.reason, finish.out_len) == ("a", "abort", 1)
    if variant is not M1:
        engine.step()
        batches = [(batch.rids, batch.left) for batch in recorder.events("batch")]
        assert batches == [(("b",), ()), (("b",), ("a",))]
    run(variant, engine)
