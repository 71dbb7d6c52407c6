"""Giving up: in every state of a request, at every moment of a step.

An abort only marks; the step's update ends the request and releases what it holds. It is reported exactly once, and no
other request notices.
"""

from typing import Any

import pytest

from m1_single_request import LLMEngine
from m1_single_request.detokenizer import IncrementalDetokenizer
from tests.m1_single_request.engines import MakeEngine, OnEvent, Recorder, drain, greedy, held

PROMPT = [21, 22, 23]


def test_an_unknown_or_finished_request_cannot_be_aborted(engine: LLMEngine) -> None:
    assert not any(engine.abort_request(name) for name in ("nobody", None, 5, [], {}))
    rid = engine.generate("a", greedy(2)).request_id
    assert not engine.abort_request(rid)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"length": 1}


def test_ids_are_exact(engine: LLMEngine) -> None:
    for rid in ("req-1", "req-10"):
        engine.add_request("a", greedy(2), request_id=rid)
    assert engine.abort_request("req-1")
    assert not engine.abort_request("req")
    last = drain(engine)
    assert {rid: output.finish_reason for rid, output in last.items()} == {"req-1": "abort", "req-10": "length"}


def test_a_waiting_request_is_aborted_at_the_next_step(engine: LLMEngine) -> None:
    first, second = engine.add_request("a", greedy(4)), engine.add_request("b", greedy(4))
    engine.step()
    assert engine.abort_request(second)
    assert engine.has_unfinished_requests()
    outputs = engine.step()
    assert outputs.keys() == {first, second}
    assert outputs[second].finish_reason == "abort" and outputs[second].token_ids == ()
    assert outputs[second].metrics.first_token_time is None
    assert len(outputs[first].token_ids) == 2, "the running request lost no time"


def test_the_only_waiting_request_is_aborted_without_running(engine: LLMEngine) -> None:
    rid = engine.add_request("a", greedy(4))
    engine.abort_request(rid)
    recorder = Recorder(engine.tracer)
    output = engine.step()[rid]
    assert (output.finish_reason, output.token_ids, output.text) == ("abort", (), "")
    assert "admit" not in recorder.kinds() and "batch" not in recorder.kinds()
    assert not engine.has_unfinished_requests()


def test_a_running_request_keeps_the_tokens_that_it_has(engine: LLMEngine) -> None:
    expected = engine.generate(PROMPT, greedy(9))
    rid = engine.add_request(PROMPT, greedy(9))
    for _ in range(3):
        engine.step()
    assert engine.abort_request(rid)
    assert held(engine) == len(PROMPT) + 2, "an abort only marks"
    output = engine.step()[rid]
    assert output.finished and output.finish_reason == "abort" and output.error is None
    assert output.token_ids == expected.token_ids[:3]
    assert expected.text.startswith(output.text)
    assert held(engine) == 0


def test_a_second_abort_is_none_and_the_end_is_reported_once(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(9))
    engine.step()
    assert engine.abort_request(rid)
    assert not engine.abort_request(rid)
    assert [engine.step().keys() for _ in range(3)] == [{rid}, set(), set()]
    assert not engine.abort_request(rid)
    assert engine.stats().num_finished == {"abort": 1}


def test_the_stream_of_an_aborted_request_ends_with_it(engine: LLMEngine) -> None:
    stream = engine.stream(PROMPT, greedy(9))
    next(stream)
    engine.abort_request(stream.request_id)
    assert [(output.finish_reason, len(output.token_ids)) for output in stream] == [("abort", 1)]


def test_a_request_that_never_stepped_after_an_abort_still_ends(engine: LLMEngine) -> None:
    ids = [engine.add_request(PROMPT, greedy(5)) for _ in range(4)]
    for rid in ids:
        engine.abort_request(rid)
    outputs = engine.step()
    assert list(outputs) == ids
    assert {output.finish_reason for output in outputs.values()} == {"abort"}


@pytest.mark.parametrize(
    ("kind", "nth", "kept", "step"),
    [
        ("admit", 1, 0, 1),  # running, but before its prefill
        ("batch", 1, 0, 1),  # between schedule and update: the first token is dropped
        ("alloc", 1, 0, 1),
        ("sampled", 1, 0, 1),
        ("batch", 4, 3, 4),
        ("sampled", 4, 3, 4),
        ("result", 4, 4, 4),  # the token was committed before
        ("step_done", 4, 4, 5),
    ],
)
def test_an_abort_within_a_step_takes_effect_at_its_update(
    engine: LLMEngine, kind: str, nth: int, kept: int, step: int
) -> None:
    expected = engine.generate(PROMPT, greedy(9))
    other = engine.generate("other", greedy(3)).token_ids
    before = engine.stats().num_steps
    rid = engine.add_request(PROMPT, greedy(9), request_id="mine")
    after = engine.add_request("other", greedy(3))
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("mine"), nth=nth)
    last: dict[str, Any] = {}
    while rid not in last or not last[rid].finished:
        assert engine.stats().num_steps - before < 9, "the abort took no effect"
        last |= engine.step()
        engine.engine_core.scheduler.check_invariants()
    assert (reader.result, reader.error) == (True, None)
    assert (last[rid].finish_reason, last[rid].token_ids) == ("abort", expected.token_ids[:kept])
    assert engine.stats().num_steps - before == step
    assert held(engine) == 0
    last |= drain(engine)
    assert last[after].token_ids == other
    assert engine.stats().num_finished == {"length": 3, "abort": 1}


def test_a_request_that_ends_by_itself_in_that_step_is_an_abort_if_it_was_marked_before(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(2))
    OnEvent(engine.tracer, "batch", lambda: engine.abort_request(rid), nth=2)
    output = drain(engine)[rid]
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)


def test_a_request_that_has_ended_by_itself_cannot_be_aborted_any_more(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(2))
    reader = OnEvent(engine.tracer, "finish", lambda: engine.abort_request(rid))
    assert drain(engine)[rid].finish_reason == "length"
    assert reader.acted and reader.result is False


def test_others_keep_their_tokens(engine: LLMEngine) -> None:
    prompts = ["one", "two", "three", "four", "five"]
    alone = [engine.generate(prompt, greedy(5)).token_ids for prompt in prompts]
    ids = [engine.add_request(prompt, greedy(5)) for prompt in prompts]
    last = {}
    for number in range(40):
        if number in (2, 7):
            engine.abort_request(ids[number // 3])  # ids[0] while running, ids[2] while waiting
        last |= engine.step()
    reasons = [last[rid].finish_reason for rid in ids]
    assert reasons == ["abort", "length", "abort", "length", "length"]
    for rid, tokens in zip(ids, alone, strict=True):
        assert last[rid].token_ids == tokens[: len(last[rid].token_ids)]
        assert last[rid].finish_reason == "abort" or last[rid].token_ids == tokens


def test_everything_about_an_abort_is_in_the_trace(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(9))
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request(rid)
    engine.step()
    assert recorder.kinds() == ["abort", "finish", "free", "step_done"]
    abort, finish, free, _ = (record.event for record in recorder.records)
    assert (abort.rid, abort.state) == (rid, "running")
    assert (finish.rid, finish.reason, finish.out_len) == (rid, "abort", 1)
    assert (free.owner, free.tokens) == (rid, len(PROMPT))


class AbortsWhilePushing(IncrementalDetokenizer):
    """Gives its request up while the token that ends it is being committed, as a signal handler may."""

    engine: LLMEngine | None = None
    pushes = 0

    def push(self, token_id: int) -> None:
        type(self).pushes += 1
        if self.pushes == 2 and self.engine is not None:
            assert self.engine.abort_request("x")
        super().push(token_id)


def test_an_abort_that_was_accepted_is_never_lost(make_engine: MakeEngine) -> None:
    AbortsWhilePushing.pushes, AbortsWhilePushing.engine = 0, None
    engine = AbortsWhilePushing.engine = make_engine({"detokenizer": AbortsWhilePushing})
    assert engine.generate(PROMPT, greedy(2), request_id="x").finish_reason == "abort"
    AbortsWhilePushing.engine = None
