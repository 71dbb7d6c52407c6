"""The public face: what goes in, what comes out, and what is refused before anything changes."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request import (
    DuplicateRequestError,
    EngineClosedError,
    EngineUsageError,
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    LLMEngine,
    SamplingParams,
)
from tests.m1_single_request.engines import MakeEngine, OnEvent, drain, greedy, held, unfinished
from tests.support.forks import in_a_fork

PROMPT = "Once upon a time"


# --- what may come with a request -------------------------------------------------------------------------------------


OPTION_CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda engine, **options: engine.generate(PROMPT, **options),
    "generate_batch": lambda engine, **options: engine.generate_batch([PROMPT], **options),
    "chat": lambda engine, **options: engine.chat([{"role": "user", "content": "Hi"}], **options),
    "stream": lambda engine, **options: engine.stream(PROMPT, **options),
    "add_request": lambda engine, **options: engine.add_request(PROMPT, **options),
}


@pytest.mark.parametrize("call", OPTION_CALLS.values(), ids=OPTION_CALLS)
@pytest.mark.parametrize("option", ["priority", "cache_salt", "speculate", "temperature"])
def test_an_option_of_a_later_milestone_is_refused(engine: LLMEngine, call: Callable[..., Any], option: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{option}= is unknown here: .* takes request_id"):
        call(engine, **{option: 1})
    assert not engine.has_unfinished_requests()


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_returns_the_finished_output(engine: LLMEngine) -> None:
    tokenizer = engine.engine_core.input_processor.tokenizer
    output = engine.generate(PROMPT, greedy(6))
    assert output.request_id == "req-0"
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == tuple(tokenizer.encode(PROMPT))
    assert output.finished and output.finish_reason == "length" and output.error is None
    assert len(output.token_ids) == 6
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert len(output.outputs) == 1 and output.outputs[0].index == 0 and output.outputs[0].stop_reason is None
    assert output.outputs[0].logprobs is None and output.prompt_logprobs is None
    assert not engine.has_unfinished_requests()


def test_metrics_tell_counts_and_ordered_times(engine: LLMEngine) -> None:
    metrics = engine.generate([5, 6, 7], greedy(4)).metrics
    assert (metrics.num_prompt_tokens, metrics.cached_tokens, metrics.num_output_tokens) == (3, 0, 4)
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert 0 <= metrics.time_to_first_token <= metrics.latency
    assert metrics.time_per_output_token == pytest.approx((metrics.latency - metrics.time_to_first_token) / 3)


def test_without_parameters_the_defaults_hold(engine: LLMEngine) -> None:
    assert engine.generate(PROMPT).token_ids == engine.generate(PROMPT, SamplingParams()).token_ids


@pytest.mark.parametrize("form", [list, tuple], ids=["list", "tuple"])
def test_token_ids_are_a_prompt_as_well(engine: LLMEngine, form: Callable[..., Any]) -> None:
    ids = engine.engine_core.input_processor.tokenizer.encode(PROMPT)
    output = engine.generate(form(ids), greedy(6))
    assert output.prompt is None
    assert output.token_ids == engine.generate(PROMPT, greedy(6)).token_ids


# --- generate_batch ---------------------------------------------------------------------------------------------------


def test_a_batch_answers_in_order_of_submission(engine: LLMEngine) -> None:
    prompts = ["one", [7, 8, 9], "three", "one"]
    outputs = engine.generate_batch(prompts, greedy(5))
    assert list(outputs) == ["req-0", "req-1", "req-2", "req-3"]
    assert all(rid == output.request_id and output.finished for rid, output in outputs.items())
    alone = [engine.generate(prompt, greedy(5)).token_ids for prompt in prompts]
    assert [output.token_ids for output in outputs.values()] == alone


def test_each_prompt_of_a_batch_may_have_its_own_parameters(engine: LLMEngine) -> None:
    outputs = engine.generate_batch(["one", "two"], [greedy(2), greedy(5)])
    assert [len(output.token_ids) for output in outputs.values()] == [2, 5]


def test_an_empty_batch_is_empty(engine: LLMEngine) -> None:
    assert engine.generate_batch([], greedy(3)) == {}


@pytest.mark.parametrize("bad", ["", [], [10**6], [-1], 5, None, b"bytes", "\ud800", deque([10**6])], ids=repr)
def test_one_bad_prompt_of_a_batch_fails_alone(engine: LLMEngine, bad: Any) -> None:
    outputs = list(engine.generate_batch(["one", bad, "three"], greedy(4)).values())
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, InvalidPromptError)
    assert outputs[1].finished and outputs[1].token_ids == () and outputs[1].text == ""
    assert outputs[0].token_ids == engine.generate("one", greedy(4)).token_ids
    assert outputs[2].token_ids == engine.generate("three", greedy(4)).token_ids


def test_bad_parameters_of_one_prompt_fail_it_alone(engine: LLMEngine) -> None:
    outputs = list(engine.generate_batch(["one", "two"], [greedy(2), greedy(2, stop_token_ids=[10**6])]).values())
    assert [output.finish_reason for output in outputs] == ["length", "error"]
    assert isinstance(outputs[1].error, InvalidParamsError)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (["a", "b"], [SamplingParams()]),
        (["a"], []),
        ("ab", None),
        (None, None),
        (7, None),
        (["a", "b"], "ab"),
        (["a"], {"max_tokens": 3}),
        (["a"], 5),
    ],
    ids=repr,
)
def test_a_batch_that_makes_no_sense_raises_before_anything_changes(
    engine: LLMEngine, prompts: Any, params: Any
) -> None:
    with pytest.raises(InvalidRequestError):
        engine.generate_batch(prompts, params)
    assert not engine.has_unfinished_requests()
    assert engine.generate("a", greedy(1)).request_id == "req-0"


def test_a_batch_runs_beside_other_requests(engine: LLMEngine) -> None:
    mine = engine.add_request("mine", greedy(9))
    outputs = engine.generate_batch(["one", "two"], greedy(3))
    assert mine not in outputs and len(outputs) == 2
    assert drain(engine)[mine].token_ids == engine.generate("mine", greedy(9)).token_ids


# --- step by step -----------------------------------------------------------------------------------------------------


def test_an_idle_step_does_nothing(engine: LLMEngine) -> None:
    assert engine.step() == {}
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_steps == 0


def test_every_step_reports_what_changed(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(3))
    seen = []
    for _ in unfinished(engine):
        outputs = engine.step()
        assert list(outputs) == [rid]
        seen.append(outputs[rid])
    assert [len(output.token_ids) for output in seen] == [1, 2, 3]
    assert [output.finished for output in seen] == [False, False, True]
    assert seen[-1].token_ids == engine.generate(PROMPT, greedy(3)).token_ids
    assert engine.step() == {}


def test_requests_run_one_after_the_other_in_order(engine: LLMEngine) -> None:
    ids = [engine.add_request(prompt, greedy(2)) for prompt in ("a", "b", "c")]
    order = [rid for _ in range(6) for rid in engine.step()]
    assert order == [ids[0], ids[0], ids[1], ids[1], ids[2], ids[2]]


def test_step_reports_what_ended_while_a_stream_was_read(engine: LLMEngine) -> None:
    mine = engine.add_request("mine", greedy(2))
    engine.generate("other", greedy(2))
    assert engine.has_unfinished_requests()
    outputs = engine.step()
    assert outputs[mine].finished and len(outputs[mine].token_ids) == 2
    assert not engine.has_unfinished_requests()


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_add_up(engine: LLMEngine) -> None:
    outputs = list(engine.generate_batch(["one", "two three", [4, 5, 6]], greedy(4)).values())
    gone = engine.add_request("gone", greedy(9))
    late = engine.add_request("late", greedy(9))
    engine.step()
    engine.step()
    engine.abort_request(gone)
    engine.abort_request(late)
    last = drain(engine)
    stats = engine.stats()
    assert stats.num_finished == {"length": 3, "abort": 2}
    everyone = [*outputs, *last.values()]
    assert stats.num_output_tokens == sum(len(output.token_ids) for output in everyone)
    assert stats.num_prompt_tokens == sum(o.metrics.num_prompt_tokens for o in [*outputs, last[gone]])
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)


def test_stats_tell_what_is_held_now(engine: LLMEngine) -> None:
    engine.add_request([5] * 7, greedy(9))
    engine.add_request([6], greedy(9))
    per_token = engine.engine_core.model_runner.kv_bytes_per_token
    assert (engine.stats().num_waiting, engine.stats().num_running) == (2, 0)
    for steps in (1, 2, 3):
        engine.step()
        stats = engine.stats()
        assert (stats.num_steps, stats.num_waiting, stats.num_running) == (steps, 1, 1)
        assert stats.kv_tokens == 7 + steps - 1
        assert stats.kv_bytes == stats.kv_tokens * per_token
        assert stats.num_output_tokens == steps


def test_tokens_dropped_by_an_abort_are_not_counted(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(9))
    OnEvent(engine.tracer, "batch", lambda: engine.abort_request(rid), nth=3)
    output = drain(engine)[rid]
    assert len(output.token_ids) == 2
    assert engine.stats().num_output_tokens == 2


# --- request ids ------------------------------------------------------------------------------------------------------


def test_a_request_id_in_use_is_refused(engine: LLMEngine) -> None:
    engine.add_request("one", greedy(2), request_id="mine")
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(DuplicateRequestError, match="'mine'"):
            call("two", greedy(2), request_id="mine")
    assert drain(engine)["mine"].prompt == "one"


def test_a_request_id_is_free_again_after_its_end(engine: LLMEngine) -> None:
    first = engine.generate("one", greedy(2), request_id="mine")
    second = engine.generate("two", greedy(2), request_id="mine")
    assert (first.prompt, second.prompt) == ("one", "two")


def test_a_request_id_is_in_use_until_its_end_was_fetched(engine: LLMEngine) -> None:
    engine.add_request("one", greedy(1), request_id="stepped")
    stream = engine.stream("one", greedy(1), request_id="streamed")
    engine.generate("other", greedy(1))  # ends the two others on the way
    for rid in ("stepped", "streamed"):
        with pytest.raises(DuplicateRequestError):
            engine.add_request("two", greedy(1), request_id=rid)
    assert engine.step()["stepped"].prompt == "one"
    assert [output.prompt for output in stream] == ["one"]
    for rid in ("stepped", "streamed"):
        engine.add_request("two", greedy(1), request_id=rid)
    assert {rid: output.prompt for rid, output in drain(engine).items()} == {"stepped": "two", "streamed": "two"}


def test_made_up_ids_keep_clear_of_chosen_ones(engine: LLMEngine) -> None:
    engine.add_request("chosen", greedy(1), request_id="req-1")  # unfinished
    outputs = engine.generate_batch(["", "b", "c"], greedy(1))
    assert len(outputs) == 3 and "req-1" not in outputs
    assert [output.prompt for output in outputs.values()] == ["", "b", "c"]
    assert engine.step()["req-1"].prompt == "chosen"


def test_made_up_ids_keep_clear_of_ids_chosen_ahead_of_them(engine: LLMEngine) -> None:
    engine.add_request("chosen", greedy(1), request_id="req-3")
    ids = [engine.add_request("x", greedy(1)) for _ in range(4)]
    assert len({*ids, "req-3"}) == 5
    assert len(drain(engine)) == 5


def test_made_up_ids_keep_clear_of_outputs_that_wait_to_be_fetched(engine: LLMEngine) -> None:
    engine.add_request("chosen", greedy(1), request_id="req-2")
    engine.generate("x", greedy(1))
    mine = engine.add_request("y", greedy(1))
    assert mine != "req-2"
    last = drain(engine)
    assert (last["req-2"].prompt, last[mine].prompt) == ("chosen", "y")


@pytest.mark.parametrize("rid", ["", 5, b"mine", ["mine"]], ids=repr)
def test_a_request_id_is_a_string(engine: LLMEngine, rid: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request("one", request_id=rid)


def test_a_refused_request_changes_nothing(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0)
    expected = make_engine().generate(PROMPT, params)
    engine = make_engine()
    for prompt, bad in [("", params), ([10**6], params), (PROMPT, {"max_tokens": 3}), (PROMPT, greedy(2, n=2))]:
        with pytest.raises(InvalidRequestError):
            engine.generate(prompt, bad)
    output = engine.generate(PROMPT, params)
    assert (output.request_id, output.token_ids) == (expected.request_id, expected.token_ids)


# --- closing, threads, trace readers ----------------------------------------------------------------------------------

CALLS: dict[str, Callable[[LLMEngine], Any]] = {
    "generate": lambda engine: engine.generate("a", greedy(1)),
    "generate_batch": lambda engine: engine.generate_batch(["a"], greedy(1)),
    "stream": lambda engine: engine.stream("a", greedy(1)),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "a"}], greedy(1)),
    "chat_prompt": lambda engine: engine.chat_prompt([{"role": "user", "content": "a"}]),
    "add_request": lambda engine: engine.add_request("a", greedy(1)),
    "step": lambda engine: engine.step(),
}


def test_close_releases_everything_and_may_be_called_twice(engine: LLMEngine) -> None:
    engine.add_request(PROMPT, greedy(9))
    engine.add_request(PROMPT, greedy(9))
    engine.step()
    assert held(engine) > 0
    engine.close()
    assert held(engine) == 0
    engine.close()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_engine_says_so(engine: LLMEngine, call: Callable[[LLMEngine], Any]) -> None:
    engine.close()
    with pytest.raises(EngineClosedError):
        call(engine)


def test_a_stream_of_a_closed_engine_says_so(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(3))
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        next(stream)
    stream.close()


def test_leaving_the_context_closes_the_engine(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        engine.add_request("a", greedy(3))
        engine.step()
    with pytest.raises(EngineClosedError):
        engine.step()
    with pytest.raises(ZeroDivisionError), make_engine() as engine:
        raise ZeroDivisionError
    with pytest.raises(EngineClosedError):
        engine.step()


def test_another_thread_is_told_whose_engine_it_is(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(2))
    calls = CALLS | {
        "next": lambda engine: next(stream),
        "close stream": lambda engine: stream.close(),
        "abort_request": lambda engine: engine.abort_request("req-0"),
        "has_unfinished_requests": lambda engine: engine.has_unfinished_requests(),
        "stats": lambda engine: engine.stats(),
        "close": lambda engine: engine.close(),
    }
    raised: dict[str, BaseException] = {}

    def run() -> None:
        for name, call in calls.items():
            try:
                call(engine)
            except EngineUsageError as error:
                raised[name] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised.keys() == calls.keys()
    assert all("thread" in str(error) for error in raised.values())
    assert [len(output.token_ids) for output in stream] == [1, 2]


def test_a_forked_process_is_told_whose_engine_it_is(engine: LLMEngine) -> None:
    """It has none of the threads that compute: a step would wait for them for ever."""
    calls = CALLS | {"stats": lambda engine: engine.stats(), "close": lambda engine: engine.close()}
    told = in_a_fork(lambda: {name: error_of(engine, call) for name, call in calls.items()})
    assert told == dict.fromkeys(calls, "EngineUsageError")
    assert len(engine.generate("a", greedy(2)).token_ids) == 2


def error_of(engine: LLMEngine, call: Any) -> str:
    """The type of what a call raises."""
    try:
        call(engine)
    except Exception as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("name", [*CALLS, "next", "close"])
@pytest.mark.parametrize("kind", ["batch", "result", "step_done"])
def test_a_trace_reader_cannot_run_the_engine(engine: LLMEngine, name: str, kind: str) -> None:
    stream = engine.stream("streamed", greedy(2))
    calls = CALLS | {"next": lambda engine: next(stream), "close": lambda engine: engine.close()}
    mine = engine.add_request("mine", greedy(4))
    reader = OnEvent(engine.tracer, kind, lambda: calls[name](engine))
    last = drain(engine)
    assert reader.acted and isinstance(reader.error, EngineUsageError)
    assert "inside another call" in str(reader.error)
    assert last[mine].token_ids == engine.generate("mine", greedy(4)).token_ids
    assert len(list(stream)) == 2


def test_a_closed_engine_claims_no_work(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(4), request_id="x")
    engine.close()
    assert not engine.has_unfinished_requests() and not engine.abort_request("x")
