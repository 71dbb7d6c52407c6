"""A batch behind the face of m1: requests share steps, join and leave between any two of them, and keep their answers.

What the face promises whatever runs behind it is tested with m1; here is what a batch adds.
"""

from itertools import pairwise
from typing import Any

import pytest

from m1_single_request import EngineClosedError, PromptTooLongError, SamplingParams
from tests.engine_contract.crowd import MakeEngine, calls_of, ids, run
from tests.engine_contract.variants import CUT, WHOLE, WITH_M1, Variant
from tests.support.engines import MAX_MODEL_LEN, Recorder, greedy, held, unfinished

pytestmark = pytest.mark.sample(3)

# --- which requests share a step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", WITH_M1, ids=str)
def test_with_room_for_one_it_is_m1(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=1)
    for number, rid in enumerate("abc"):
        engine.add_request(ids(3, 10 * number), greedy(2), request_id=rid)
    order = [list(engine.step()) for _ in unfinished(engine)]
    assert order == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]]


@pytest.mark.parametrize("variant", [variant for variant in WHOLE if variant.mixes], ids=str)
def test_a_late_prompt_may_delay_a_running_request_by_one_step_only(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(seats=4, budget=8)
    engine.add_request(ids(2), greedy(20), request_id="a")
    engine.step()
    recorder = Recorder(engine.tracer)
    for number in range(6):
        engine.add_request(ids(8, number), greedy(1), request_id=f"long-{number}")
    for _ in range(12):
        engine.step()
        variant.check_step(engine)
    steps = [batch.rids for batch in recorder.events("batch")]
    assert steps[:4] == [("long-0",), ("a",), ("long-1",), ("a",)]
    assert all("a" in first + second for first, second in pairwise(steps))
    assert [event.rids for event in recorder.events("left_out")] == [("a",)] * 6


@pytest.mark.parametrize("variant", CUT, ids=str)
def test_late_prompts_delay_nobody_where_they_are_cut(variant: Variant, make_engine: MakeEngine, make_m1: Any) -> None:
    """However long they are."""
    alone = make_m1()
    engine = make_engine(seats=3, budget=8)
    engine.add_request(ids(2), greedy(40), request_id="a")
    engine.step()
    for number in range(3):
        engine.add_request(ids(20 + number, number), greedy(2), request_id=f"long-{number}")
    outputs: dict[str, Any] = {}
    for _ in unfinished(engine):
        before = outputs.get("a")
        outputs |= engine.step()
        variant.check_step(engine)
        assert outputs["a"] is not before or outputs["a"].finished
    for number in range(3):
        expected = alone.generate(ids(20 + number, number), greedy(2)).token_ids
        assert outputs[f"long-{number}"].token_ids == expected


def test_generate_streams_and_steps_share_the_batch(variant: Variant, make_engine: MakeEngine, make_m1: Any) -> None:
    alone = make_m1()
    engine = make_engine(seats=3)
    recorder = Recorder(engine.tracer)
    mine = engine.add_request(ids(4), greedy(12))
    stream, other = engine.stream(ids(6), greedy(5)), engine.stream(ids(2), greedy(9))
    assert len(next(stream).token_ids) == 1
    assert engine.generate(ids(7), greedy(3)).token_ids == alone.generate(ids(7), greedy(3)).token_ids
    assert [len(output.token_ids) for output in stream] == [2, 3, 4, 5]
    *_, last = other
    assert last.token_ids == alone.generate(ids(2), greedy(9)).token_ids
    assert run(variant, engine)[mine].token_ids == alone.generate(ids(4), greedy(12)).token_ids
    assert max(len(batch.rids) for batch in recorder.events("batch")) == 3


# --- what can never run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", WHOLE, ids=str)
def test_a_prompt_over_the_token_budget_is_refused_with_both_numbers(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2, budget=20)
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(PromptTooLongError, match=r"21 prompt tokens.*max_num_batched_tokens is 20"):
            call(ids(21), greedy(2), request_id="long")
    assert not engine.has_unfinished_requests()
    assert len(engine.generate(ids(20), greedy(2), request_id="long").token_ids) == 2


def test_a_prompt_over_the_model_s_length_is_refused_with_both_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2)
    with pytest.raises(PromptTooLongError, match=f"{MAX_MODEL_LEN} prompt tokens; max_model_len is {MAX_MODEL_LEN}"):
        engine.add_request(ids(MAX_MODEL_LEN), greedy(2))
    output = engine.generate(ids(MAX_MODEL_LEN - 1), greedy(9))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 1)


def test_the_limit_of_the_model_ends_each_request_for_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=4, max_model_len=16)
    outputs = engine.generate_batch([ids(n) for n in (3, 15, 8, 12, 15)], greedy(99))
    assert [len(output.token_ids) for output in outputs.values()] == [13, 1, 8, 4, 1]


# --- the face ---------------------------------------------------------------------------------------------------------


def test_a_batch_answers_in_order_of_submission_whichever_ends_first(
    variant: Variant, make_engine: MakeEngine, make_m1: Any
) -> None:
    """All are queued before the first step; a bad prompt gets an error and changes no other draw."""
    engine = make_engine(seats=3)
    recorder = Recorder(engine.tracer)
    prompts: list[Any] = [[5, 6, 7], "two", "", [9], [10**6], [3, 1, 4, 1, 5]]
    params = [greedy(9), greedy(2), greedy(1), SamplingParams(max_tokens=5, temperature=1.0), greedy(1), greedy(7)]
    outputs = engine.generate_batch(prompts, params)
    assert list(outputs) == [f"req-{n}" for n in range(6)]
    expected = make_m1().generate_batch(prompts, params)
    for output, wanted in zip(outputs.values(), expected.values(), strict=True):
        assert (output.prompt, output.token_ids, output.text) == (wanted.prompt, wanted.token_ids, wanted.text)
        assert (output.finished, output.finish_reason) == (True, wanted.finish_reason)
    assert [output.finish_reason for output in outputs.values()].count("error") == 2
    assert len(recorder.events("batch")[0].rids) == 3
    variant.check_drained(engine)


def test_every_step_reports_every_request_that_got_a_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for rid, max_tokens in (("a", 3), ("b", 1), ("c", 2)):
        engine.add_request(ids(3, ord(rid)), greedy(max_tokens), request_id=rid)
    seen = [{rid: len(o.token_ids) for rid, o in engine.step().items()} for _ in unfinished(engine)]
    assert seen == [{"a": 1, "b": 1, "c": 1}, {"a": 2, "c": 2}, {"a": 3}]
    assert engine.step() == {}


def test_the_phases_of_a_step_follow_each_other(make_engine: MakeEngine) -> None:
    """Their times are those of the trace: a step's lie between its first event and its last."""
    engine = make_engine()
    recorder = Recorder(engine.tracer)
    engine.generate_batch([[5, 6, 7], [8, 9]], greedy(4))
    for done in [record for record in recorder.records if record.event.ends_step]:
        phases = done.event.phases()
        assert phases[0].name == "schedule"
        assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(phases)) and phases[-1].ended <= done.time
        begun = min(record.time for record in recorder.records if record.step == done.step)
        assert phases[0].began < begun < phases[-1].ended
        assert {name for name, began, ended in phases if ended > began} == {"schedule", "execute", "sample", "update"}


def test_closing_releases_all_of_the_batch(variant: Variant, make_engine: MakeEngine) -> None:
    """What the runner holds and what the scheduler gave away, though a request still waits."""
    engine = make_engine(seats=3)
    for number, length in enumerate((3, 5, 2, 4)):
        engine.add_request(ids(length, 10 * number), greedy(9), request_id=str(number))
    engine.step()
    assert held(engine) >= 3 + 5 + 2 and set(variant.owners(engine)) == {"0", "1", "2"}
    engine.close()
    assert held(engine) == 0 and not list(variant.owners(engine))
    assert not engine.has_unfinished_requests() and not engine.abort_request("0")
    for call in calls_of(engine):
        with pytest.raises(EngineClosedError):
            call()
