"""The public face: what goes in, what comes out, and what is refused before anything changes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request import (
    DuplicateRequestError,
    EngineClosedError,
    EngineUsageError,
    InvalidRequestError,
    LLMEngine,
    SamplingParams,
)
from tests.m1_single_request.engines import MakeEngine, OnEvent, drain, greedy, unfinished
from tests.support.forks import in_a_fork

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda engine, **options: engine.generate(PROMPT, greedy(1), **options),
    "generate_batch": lambda engine, **options: engine.generate_batch([PROMPT], greedy(1), **options),
    "chat": lambda engine, **options: engine.chat(MESSAGES, greedy(1), **options),
    "stream": lambda engine, **options: engine.stream(PROMPT, greedy(1), **options),
    "add_request": lambda engine, **options: engine.add_request(PROMPT, greedy(1), **options),
}
"""Every call that makes a request."""
ALL_CALLS = CALLS | {"chat_prompt": lambda engine: engine.chat_prompt(MESSAGES), "step": lambda engine: engine.step()}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
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


def test_metrics_are_counts_and_ordered_times(engine: LLMEngine) -> None:
    metrics = engine.generate([5, 6, 7], greedy(4)).metrics
    assert (metrics.num_prompt_tokens, metrics.cached_tokens, metrics.num_output_tokens) == (3, 0, 4)
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert 0 <= metrics.time_to_first_token <= metrics.latency
    assert metrics.time_per_output_token == pytest.approx((metrics.latency - metrics.time_to_first_token) / 3)


# --- step by step -----------------------------------------------------------------------------------------------------


def test_every_step_reports_what_changed(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(3))
    seen = []
    for _ in unfinished(engine):
        outputs = engine.step()
        assert list(outputs) == [rid]
        seen.append(outputs[rid])
    assert [(len(output.token_ids), output.finished) for output in seen] == [(1, False), (2, False), (3, True)]
    assert seen[-1].token_ids == engine.generate(PROMPT, greedy(3)).token_ids
    assert engine.step() == {}


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_add_up(engine: LLMEngine) -> None:
    outputs = list(engine.generate_batch(["one", "two three", [4, 5, 6]], greedy(4)).values())
    gone, late = (engine.add_request(name, greedy(9)) for name in ("gone", "late"))
    engine.step()
    engine.step()
    assert engine.abort_request(gone) and engine.abort_request(late)
    last = drain(engine)
    stats = engine.stats()
    assert stats.num_finished == {"length": 3, "abort": 2}
    assert stats.num_output_tokens == sum(len(output.token_ids) for output in [*outputs, *last.values()])
    assert stats.num_prompt_tokens == sum(o.metrics.num_prompt_tokens for o in [*outputs, last[gone]])
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)


def test_stats_count_what_is_held_now(engine: LLMEngine) -> None:
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


# --- request ids ------------------------------------------------------------------------------------------------------


def test_a_request_id_in_use_is_refused_and_free_after_its_end(engine: LLMEngine) -> None:
    engine.add_request("one", greedy(2), request_id="mine")
    for call in (engine.add_request, engine.generate, engine.stream):
        with pytest.raises(DuplicateRequestError, match="'mine'"):
            call("two", greedy(2), request_id="mine")
    assert drain(engine)["mine"].prompt == "one"
    assert engine.generate("two", greedy(2), request_id="mine").prompt == "two"


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


def test_generated_ids_avoid_those_in_use_and_those_whose_output_was_not_fetched(engine: LLMEngine) -> None:
    engine.add_request("chosen", greedy(1), request_id="req-2")
    outputs = engine.generate_batch(["a", "b", "c"], greedy(1))  # ends the other one on the way
    assert len(outputs) == 3 and "req-2" not in outputs
    assert [output.prompt for output in outputs.values()] == ["a", "b", "c"]
    mine = [engine.add_request("x", greedy(1)) for _ in range(4)]
    assert len({*mine, "req-2"}) == 5
    last = drain(engine)
    assert last.keys() == {*mine, "req-2"} and last["req-2"].prompt == "chosen"


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


@pytest.mark.parametrize("call", ALL_CALLS.values(), ids=ALL_CALLS)
def test_a_closed_engine_refuses_every_call(engine: LLMEngine, call: Callable[[LLMEngine], Any]) -> None:
    engine.close()
    with pytest.raises(EngineClosedError):
        call(engine)


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


def errors_of(engine: LLMEngine, calls: dict[str, Callable[..., Any]]) -> dict[str, str]:
    """The type and the text of what each call raises."""
    errors = {}
    for name, call in calls.items():
        try:
            call(engine)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_an_engine_belongs_to_one_thread(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(2))
    calls = ALL_CALLS | {
        "next": lambda engine: next(stream),
        "close stream": lambda engine: stream.close(),
        "abort_request": lambda engine: engine.abort_request("req-0"),
        "has_unfinished_requests": lambda engine: engine.has_unfinished_requests(),
        "stats": lambda engine: engine.stats(),
        "close": lambda engine: engine.close(),
    }
    errors: dict[str, str] = {}
    thread = threading.Thread(target=lambda: errors.update(errors_of(engine, calls)))
    thread.start()
    thread.join()
    assert errors.keys() == calls.keys()
    assert all(error.startswith("EngineUsageError: ") and "thread" in error for error in errors.values())
    assert [len(output.token_ids) for output in stream] == [1, 2]


def test_an_engine_belongs_to_one_process(engine: LLMEngine) -> None:
    """A forked one has none of the threads that compute: a step would wait for them for ever."""
    calls = ALL_CALLS | {"stats": lambda engine: engine.stats(), "close": lambda engine: engine.close()}
    errors = in_a_fork(lambda: errors_of(engine, calls))
    assert errors.keys() == calls.keys()
    assert all(error.startswith("EngineUsageError: ") for error in errors.values())
    assert len(engine.generate("a", greedy(2)).token_ids) == 2


@pytest.mark.parametrize("name", [*ALL_CALLS, "next", "close"])
@pytest.mark.parametrize("kind", ["batch", "result", "step_done"])
def test_a_trace_reader_cannot_run_the_engine(engine: LLMEngine, name: str, kind: str) -> None:
    stream = engine.stream("streamed", greedy(2))
    calls = ALL_CALLS | {"next": lambda engine: next(stream), "close": lambda engine: engine.close()}
    mine = engine.add_request("mine", greedy(4))
    reader = OnEvent(engine.tracer, kind, lambda: calls[name](engine))
    last = drain(engine)
    assert reader.acted and isinstance(reader.error, EngineUsageError)
    assert "inside another call" in str(reader.error)
    assert last[mine].token_ids == engine.generate("mine", greedy(4)).token_ids
    assert len(list(stream)) == 2
