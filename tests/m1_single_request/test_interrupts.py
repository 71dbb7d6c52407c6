"""A step counts whole or not at all: whatever interrupts it, the tokens afterwards are the same and nothing is lost.

A signal's exception can come between any two lines, so these tests raise KeyboardInterrupt from inside the parts that a
step runs through.
"""

import threading
import warnings
from itertools import count
from typing import Any

import pytest
from transformers import cache_utils

from m1_single_request import ConfigError, DuplicateRequestError, LLMEngine, RequestOutput, TraceConfig, TraceRecord
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.events import Finish
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.request import Request
from tests.m1_single_request.engines import MANY_STEPS, MakeEngine, drain, greedy, held
from tests.testbed.interrupts import interrupted

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupt_between_two_layers_changes_no_token(make_engine: MakeEngine, step: int, layer: int) -> None:
    """The layers before it have the step's KV already, the others do not."""
    expected = make_engine().generate(PROMPT, greedy(6)).token_ids
    engine = make_engine()
    engine.add_request(PROMPT, greedy(6), request_id="x")
    for _ in range(step - 1):
        engine.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = engine.engine_core.model_runner.model.model.layers[layer].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        hook.remove()
    assert drain(engine)["x"].token_ids == expected


def test_an_interrupt_anywhere_in_the_kv_cache_changes_no_token(make_engine: MakeEngine) -> None:
    """Between the keys and the values of a layer, too."""
    expected = make_engine().generate(PROMPT, greedy(5)).token_ids
    for line in count(1):
        engine = make_engine()
        engine.add_request(PROMPT, greedy(5), request_id="x")
        engine.step(), engine.step()
        with interrupted(line, [cache_utils]) as interrupt:
            engine.step()
        if interrupt.where is None:
            break
        output = drain(engine)["x"]
        assert (output.error, output.token_ids) == (None, expected), f"after an interrupt before {interrupt.where}"
    assert 10 < line < MANY_STEPS


class InterruptedDetokenizer(IncrementalDetokenizer):
    """Notes its token and is interrupted right after, the third time."""

    pushes = 0

    def push(self, token_id: int) -> None:
        super().push(token_id)
        type(self).pushes += 1
        if type(self).pushes == 3:
            raise KeyboardInterrupt


class FailsToName(IncrementalDetokenizer):
    """Cannot name a token, once."""

    failed = False

    def token_text(self, token_id: int) -> str:
        if not type(self).failed:
            type(self).failed = True
            raise ValueError("no name")
        return super().token_text(token_id)


def test_an_interrupt_in_the_middle_of_a_commit_doubles_nothing(make_engine: MakeEngine) -> None:
    expected = make_engine().generate(PROMPT, greedy(8))
    InterruptedDetokenizer.pushes = 0
    engine = make_engine({"detokenizer": InterruptedDetokenizer})
    rid = engine.add_request(PROMPT, greedy(8))
    with pytest.raises(KeyboardInterrupt):
        for _ in range(8):
            engine.step()
    output = drain(engine)[rid]
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert held(engine) == 0


class InterruptedAtTheEnd(OutputProcessor):
    """Is interrupted once, when a request has ended and its last output is to be made."""

    interrupted = False

    def make_output(self, request: Request) -> RequestOutput:
        if request.is_finished and not type(self).interrupted:
            type(self).interrupted = True
            raise KeyboardInterrupt
        return super().make_output(request)


def test_an_end_that_an_interrupt_kept_from_being_reported_is_reported_by_the_next_step(
    make_engine: MakeEngine,
) -> None:
    InterruptedAtTheEnd.interrupted = False
    engine = make_engine({"output_processor": InterruptedAtTheEnd})
    engine.add_request(PROMPT, greedy(2), request_id="x")
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    with pytest.raises(DuplicateRequestError):
        engine.add_request(PROMPT, request_id="x")
    output = engine.step()["x"]
    assert output.finished and output.finish_reason == "length" and len(output.token_ids) == 2
    assert not engine.has_unfinished_requests() and engine.step() == {} and held(engine) == 0
    assert engine.stats().num_finished == {"length": 1}
    assert engine.generate(PROMPT, greedy(2), request_id="x").finish_reason == "length"


def test_a_part_that_fails_in_the_middle_of_a_commit_fails_only_its_request(make_engine: MakeEngine) -> None:
    FailsToName.failed = False
    engine = make_engine({"detokenizer": FailsToName})
    outputs = engine.generate_batch([PROMPT, PROMPT], greedy(3, logprobs=1))
    first, second = outputs.values()
    assert (first.finish_reason, str(first.error), first.token_ids) == ("error", "no name", ())
    assert (second.finish_reason, len(second.token_ids)) == ("length", 3)


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


class ClosesAtFinish:
    """Closes a stream in the very step that ends it."""

    stream: Any = None

    def read(self, record: TraceRecord) -> None:
        if isinstance(record.event, Finish) and self.stream is not None:
            self.stream.close()

    def close(self) -> None:
        """Nothing to close."""


def test_a_stream_that_is_closed_while_it_ends_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    reader = ClosesAtFinish()
    engine = make_engine(trace_config=TraceConfig(readers=(reader,)))
    reader.stream = engine.stream(PROMPT, greedy(2), request_id="x")
    assert drain(engine) == {}
    reader.stream = None
    assert engine.generate(PROMPT, greedy(2), request_id="x").finish_reason == "length"


def test_a_stream_that_had_ended_when_a_reader_closed_it_swallows_nothing_later(make_engine: MakeEngine) -> None:
    """It waits, ended but unread, while another request's step runs; then its id is used again."""
    reader = ClosesAtFinish()
    engine = make_engine(trace_config=TraceConfig(readers=(reader,)))
    ended = engine.stream(PROMPT, greedy(1), request_id="x")
    engine.step()
    reader.stream = ended
    engine.generate(PROMPT, greedy(2), request_id="y")
    reader.stream = None
    engine.add_request(PROMPT, greedy(2), request_id="x")
    assert drain(engine)["x"].finish_reason == "length"


def test_a_stream_that_another_thread_lets_go_of_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    box = [engine.stream(PROMPT, greedy(50), request_id="x")]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert drain(engine) == {}
    assert engine.stats().num_finished == {"abort": 1} and engine.stats().num_steps == 1


def test_what_a_reader_of_the_output_does_to_it_changes_no_later_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.generate(PROMPT, greedy(4, logprobs=2, prompt_logprobs=1))
    last: Any = None
    for last in engine.stream(PROMPT, greedy(4, logprobs=2, prompt_logprobs=1)):
        if not last.finished:
            last.outputs[0].logprobs[0].clear()
            last.prompt_logprobs[1].clear()
    assert (last.outputs, last.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)


def test_a_closed_engine_claims_no_work(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, greedy(4), request_id="x")
    engine.close()
    assert not engine.has_unfinished_requests() and not engine.abort_request("x")


class Broken:
    """Fails at its first record."""

    def read(self, record: TraceRecord) -> None:
        raise OSError("gone")

    def close(self) -> None:
        """Nothing to close."""


def test_a_failing_reader_disturbs_nothing_even_where_warnings_are_errors(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.generate(PROMPT, greedy(3)).token_ids
    engine.tracer.attach(Broken())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(PROMPT, greedy(3)).token_ids == expected
    assert not engine.tracer


@pytest.mark.parametrize("reader", [object(), 5, "text"])
def test_a_reader_that_cannot_read_is_refused(make_engine: MakeEngine, reader: Any) -> None:
    with pytest.raises(ConfigError, match=r"read\(record\) and close\(\)"):
        make_engine().tracer.attach(reader)
