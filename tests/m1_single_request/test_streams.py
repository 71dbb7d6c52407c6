"""Streams: an output after every step that added tokens, side by side, and given up in every way a caller has."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m1_single_request import LLMEngine, RequestOutput, SamplingParams, TraceConfig, TraceRecord
from m1_single_request.output_events import Finish
from tests.m1_single_request.engines import MakeEngine, OnEvent, drain, greedy, held, scripted
from tests.support.amounts import examples


def check_growth(outputs: list[RequestOutput]) -> str:
    """The joined text of a stream whose text only ever grows and whose last output alone is finished."""
    text, token_ids = "", ()
    for output in outputs:
        assert output.text.startswith(text), "text was shown and taken back"
        assert output.token_ids[: len(token_ids)] == token_ids
        text, token_ids = text + output.text[len(text) :], output.token_ids
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return text


def test_a_stream_yields_after_every_step_that_added_tokens(engine: LLMEngine) -> None:
    stream = engine.stream("Once upon a time", greedy(6))
    outputs = list(stream)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert engine.stats().num_steps == 6
    assert next(stream, None) is None and list(stream) == []
    stream.close()
    whole = engine.generate("Once upon a time", greedy(6))
    assert (check_growth(outputs), outputs[-1].token_ids) == (whole.text, whole.token_ids)


def test_a_stream_keeps_what_came_while_others_were_read(engine: LLMEngine) -> None:
    early, late = engine.stream("early", greedy(3)), engine.stream("late", greedy(3))
    assert not early.is_ready()
    assert len(list(late)) == 3
    steps = engine.stats().num_steps
    assert early.is_ready()
    assert [len(output.token_ids) for output in early] == [1, 2, 3]
    assert engine.stats().num_steps == steps, "nothing had to be computed any more"
    assert not early.is_ready()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_cannot_be_copied_because_its_outputs_are_read_once(
    engine: LLMEngine, copied: Callable[[Any], Any]
) -> None:
    stream = engine.stream([1, 2], greedy(2))
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(stream)
    assert [len(output.token_ids) for output in stream] == [1, 2]


def test_what_a_reader_of_the_output_does_to_it_changes_no_later_output(engine: LLMEngine) -> None:
    expected = engine.generate([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1))
    last: Any = None
    for last in engine.stream([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1)):
        if not last.finished:
            last.outputs[0].logprobs[0].clear()
            last.prompt_logprobs[1].clear()
    assert (last.outputs, last.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)


# --- given up ---------------------------------------------------------------------------------------------------------


def test_closing_a_stream_aborts_its_request(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(9))
    next(stream)
    next(stream)
    assert held(engine) == 2
    stream.close()
    stream.close()
    assert next(stream, None) is None
    assert engine.has_unfinished_requests()
    assert engine.step() == {}, "the end of a closed stream is reported to no caller"
    assert held(engine) == 0
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_finished == {"abort": 1}


def test_leaving_the_context_of_a_stream_closes_it(engine: LLMEngine) -> None:
    with engine.stream("a", greedy(9)) as stream:
        next(stream)
    engine.step()
    assert engine.stats().num_finished == {"abort": 1}


@pytest.mark.parametrize("reads", [0, 3])
def test_dropping_a_stream_aborts_its_request(engine: LLMEngine, reads: int) -> None:
    stream = engine.stream("a", greedy(9))
    for _ in range(reads):
        next(stream)
    del stream
    gc.collect()
    mine = engine.add_request("b", greedy(2))
    assert drain(engine).keys() == {mine}
    assert engine.stats().num_finished == {"abort": 1, "length": 1}


@pytest.mark.parametrize("kind", ["admit", "batch", "sampled"])
def test_a_stream_dropped_inside_a_step_changes_nothing_in_it_and_the_next_call_aborts(
    engine: LLMEngine, kind: str
) -> None:
    """As the garbage collector does it: at any line, between any two changes of the scheduler."""
    streams = [engine.stream("a", greedy(9))]
    dropped = OnEvent(engine.tracer, kind, streams.clear)
    engine.step()
    assert dropped.acted and dropped.error is None
    stats = engine.stats()
    assert (stats.num_finished, stats.num_output_tokens) == ({}, 1)
    assert engine.step() == {}
    stats = engine.stats()
    assert (stats.num_finished, stats.num_output_tokens, held(engine)) == ({"abort": 1}, 1, 0)


def test_a_stream_closed_after_its_end_leaves_nothing_behind(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(1), request_id="mine")
    engine.generate("b", greedy(1))  # ends the stream's request on the way
    stream.close()
    engine.add_request("c", greedy(2), request_id="mine")
    last = drain(engine)
    assert last["mine"].prompt == "c" and last["mine"].finish_reason == "length"


class ClosesAtFinish:
    """A trace reader that closes a stream in the very step that ends a request."""

    stream: Any = None

    def read(self, record: TraceRecord) -> None:
        if isinstance(record.event, Finish) and self.stream is not None:
            self.stream.close()
            self.stream = None

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("waits", [False, True], ids=["while it ends", "ended but unread"])
def test_a_stream_closed_by_a_reader_takes_no_output_of_a_later_request(make_engine: MakeEngine, waits: bool) -> None:
    reader = ClosesAtFinish()
    engine = make_engine(trace_config=TraceConfig(readers=(reader,)))
    stream = engine.stream([5, 6, 7], greedy(1), request_id="x")
    if waits:
        engine.step()
    reader.stream = stream
    engine.generate([5, 6, 7], greedy(2), request_id="y")
    engine.add_request([5, 6, 7], greedy(2), request_id="x")
    assert drain(engine)["x"].finish_reason == "length"


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tiny_directory: Path) -> Iterator[LLMEngine]:
    """One engine for all examples of a property."""
    with LLMEngine(tiny_directory) as engine:
        yield engine


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_tokens_joined_are_the_decoded_text(shared: LLMEngine, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 4095), min_size=1, max_size=12))
    shared.engine_core.sampler = scripted(token_ids)()
    tokenizer = shared.engine_core.input_processor.tokenizer
    text = check_growth(list(shared.stream([1], greedy(len(token_ids)))))
    assert text == tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_stop_strings_cut_the_text_and_nothing_is_taken_back(shared: LLMEngine, data: st.DataObject) -> None:
    text = data.draw(st.text("abé😀 ", min_size=1, max_size=16))
    stops = data.draw(st.lists(st.text("abé😀 ", min_size=1, max_size=4), min_size=1, max_size=3))
    keep = data.draw(st.booleans())
    token_ids = shared.engine_core.input_processor.tokenizer.encode(text)
    shared.engine_core.sampler = scripted(token_ids)()
    params = greedy(len(token_ids), stop=stops, include_stop_str_in_output=keep)
    outputs = list(shared.stream([1], params))
    joined, last = check_growth(outputs), outputs[-1]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if ends:
        end, _, stop = min(ends)
        assert (last.finish_reason, last.outputs[0].stop_reason) == ("stop", stop)
        assert joined == text[: end if keep else end - len(stop)]
    else:
        assert last.finish_reason == "length"
        assert joined == text


@pytest.mark.parametrize(
    ("letters", "shown", "stop_reason"),
    [("xSTySTOPz", ["x", "x", "x", "xSTy", "xSTy", "xSTy", "xSTy", "xSTy"], "STOP"), ("xST", ["x", "x", "xST"], None)],
    ids=["it comes", "it does not come"],
)
def test_what_may_become_a_stop_string_is_held_back(
    make_engine: MakeEngine, letters: str, shown: list[str], stop_reason: str | None
) -> None:
    tokenizer = make_engine().engine_core.input_processor.tokenizer
    engine = make_engine({"sampler": scripted(tokenizer.encode(letter)[0] for letter in letters)})
    outputs = list(engine.stream("a", SamplingParams(max_tokens=len(letters), stop="STOP")))
    assert [output.text for output in outputs] == shown
    assert outputs[-1].outputs[0].stop_reason == stop_reason
