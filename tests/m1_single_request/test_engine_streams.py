"""Streams: an output after every step that added tokens, side by side, and given up in every way a caller has."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m1_single_request import LLMEngine, RequestOutput, SamplingParams, TraceConfig, TraceRecord
from m1_single_request.output_events import Finish
from tests.m1_single_request.engines import MakeEngine, OnEvent, drain, greedy, held, scripted, unfinished
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
    outputs = list(engine.stream("Once upon a time", greedy(6)))
    assert [len(output.token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert engine.stats().num_steps == 6
    whole = engine.generate("Once upon a time", greedy(6))
    assert (check_growth(outputs), outputs[-1].token_ids) == (whole.text, whole.token_ids)


def test_an_exhausted_stream_stays_exhausted(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(2))
    list(stream)
    assert next(stream, None) is None
    assert list(stream) == []
    stream.close()


def test_streams_run_side_by_side_and_beside_steps(engine: LLMEngine) -> None:
    alone = {prompt: engine.generate(prompt, greedy(5)) for prompt in ("one", "two", "three", "four")}
    streams = {prompt: engine.stream(prompt, greedy(5)) for prompt in ("one", "two")}
    stepped = engine.add_request("three", greedy(5))
    streams["four"] = engine.stream("four", greedy(5))
    seen: dict[str, list[RequestOutput]] = {prompt: [] for prompt in streams}
    reported = {}
    for _ in range(5):
        for prompt in ("four", "two", "one"):
            seen[prompt].append(next(streams[prompt]))
        outputs = engine.step()
        assert outputs.keys() <= {stepped}
        reported |= outputs
    for prompt, outputs in seen.items():
        assert check_growth(outputs) == alone[prompt].text
    reported |= drain(engine)
    assert reported[stepped].token_ids == alone["three"].token_ids


def test_a_stream_keeps_what_came_while_others_were_read(engine: LLMEngine) -> None:
    early = engine.stream("early", greedy(3))
    late = engine.stream("late", greedy(3))
    assert len(list(late)) == 3
    steps = engine.stats().num_steps
    assert [len(output.token_ids) for output in early] == [1, 2, 3]
    assert engine.stats().num_steps == steps, "nothing had to be computed any more"


def test_a_stream_that_nobody_reads_runs_all_the_same(engine: LLMEngine) -> None:
    stream = engine.stream("unread", greedy(3))
    for _ in unfinished(engine):
        assert engine.step() == {}
    assert len(list(stream)) == 3


def test_closing_a_stream_aborts_its_request(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(9))
    next(stream)
    next(stream)
    assert held(engine) == 2
    stream.close()
    stream.close()
    assert next(stream, None) is None
    assert engine.has_unfinished_requests()
    assert engine.step() == {}, "nobody waits for the end of a closed stream"
    assert held(engine) == 0
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_finished == {"abort": 1}


def test_leaving_the_context_of_a_stream_closes_it(engine: LLMEngine) -> None:
    with engine.stream("a", greedy(9)) as stream:
        next(stream)
    engine.step()
    assert engine.stats().num_finished == {"abort": 1}


def test_dropping_a_stream_aborts_its_request(engine: LLMEngine) -> None:
    for output in engine.stream("a", greedy(9)):
        if len(output.token_ids) == 3:
            break
    gc.collect()
    engine.step()
    assert held(engine) == 0
    assert engine.stats().num_finished == {"abort": 1}


def test_dropping_a_stream_that_was_never_read_aborts_its_request(engine: LLMEngine) -> None:
    engine.stream("a", greedy(9))
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


def test_closing_one_stream_leaves_the_others_alone(engine: LLMEngine) -> None:
    expected = engine.generate("b", greedy(4)).token_ids
    first, second = engine.stream("a", greedy(9)), engine.stream("b", greedy(4))
    next(first)
    first.close()
    assert list(second)[-1].token_ids == expected


def test_a_stream_closed_after_its_end_leaves_nothing_behind(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(1), request_id="mine")
    engine.generate("b", greedy(1))  # ends the stream's request on the way
    stream.close()
    engine.add_request("c", greedy(2), request_id="mine")
    last = drain(engine)
    assert last["mine"].prompt == "c" and last["mine"].finish_reason == "length"


def test_a_stream_closed_after_an_abort_reports_to_nobody(engine: LLMEngine) -> None:
    stream = engine.stream("a", greedy(9))
    next(stream)
    assert engine.abort_request(stream.request_id)
    stream.close()
    assert drain(engine) == {}
    assert engine.stats().num_finished == {"abort": 1}


# --- text -------------------------------------------------------------------------------------------------------------

TEXTS = {
    "plain": "Once upon a time there was a kettle.",
    "emoji": "😀 and 👩‍👩‍👧‍👦, 🏳️‍🌈!",
    "CJK": "漢字かな交じり文、中文。",
    "accents": "naïve café, Straße, e\u0301\u0323",
    "spaces": "  two\n\n\t tabs\u00a0\u2003end ",
    "replacement": "a\ufffdb\ufffd",
    "special": "a<|im_start|>b<|endoftext|>c",
    "zero": "\x00\x01\x7f",
}


def decode(engine: LLMEngine, token_ids: list[int]) -> str:
    tokenizer = engine.engine_core.input_processor.tokenizer
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_joined_text_is_the_whole_text_is_the_decoded_text(make_engine: MakeEngine, text: str) -> None:
    token_ids = make_engine().engine_core.input_processor.tokenizer.encode(text)
    engine = make_engine({"sampler": scripted(token_ids * 2)})
    streamed = check_growth(list(engine.stream("a", greedy(len(token_ids)))))
    whole = engine.generate("a", greedy(len(token_ids)))
    assert whole.token_ids == tuple(token_ids)
    assert streamed == whole.text == decode(engine, token_ids)


def test_broken_bytes_joined_are_the_decoded_text(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().engine_core.input_processor.tokenizer
    emoji = tokenizer.encode("😀")
    assert len(emoji) > 1, "a character that takes several tokens"
    for token_ids in (emoji[:-1], emoji[1:], emoji[:-1] * 3 + tokenizer.encode("ok"), emoji[:1] + emoji):
        engine = make_engine({"sampler": scripted(token_ids * 2)})
        outputs = list(engine.stream("a", greedy(len(token_ids))))
        assert check_growth(outputs) == engine.generate("a", greedy(len(token_ids))).text == decode(engine, token_ids)
    engine = make_engine({"sampler": scripted(emoji)})
    texts = [output.text for output in engine.stream("a", greedy(len(emoji)))]
    assert texts == [""] * (len(emoji) - 1) + ["😀"], "half a character is never shown"


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> Iterator[LLMEngine]:
    """One engine for all examples of a property."""
    with LLMEngine(model_dir) as engine:
        yield engine


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_tokens_joined_are_the_decoded_text(shared: LLMEngine, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 4095), min_size=1, max_size=12))
    shared.engine_core.sampler = scripted(token_ids)()
    text = check_growth(list(shared.stream([1], greedy(len(token_ids)))))
    assert text == decode(shared, token_ids)


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


def test_what_may_become_a_stop_string_is_held_back(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().engine_core.input_processor.tokenizer
    parts = ["x", "S", "T", "y", "S", "T", "O", "P", "z"]
    token_ids = [tokenizer.encode(part)[0] for part in parts]
    engine = make_engine({"sampler": scripted(token_ids)})
    outputs = list(engine.stream("a", greedy(9, stop="STOP")))
    assert [output.text for output in outputs] == ["x", "x", "x", "xSTy", "xSTy", "xSTy", "xSTy", "xSTy"]
    assert outputs[-1].outputs[0].stop_reason == "STOP"


def test_held_back_text_is_shown_when_the_request_ends_otherwise(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().engine_core.input_processor.tokenizer
    token_ids = [tokenizer.encode(part)[0] for part in ("x", "S", "T")]
    engine = make_engine({"sampler": scripted(token_ids)})
    outputs = list(engine.stream("a", SamplingParams(max_tokens=3, stop="STOP")))
    assert [output.text for output in outputs] == ["x", "x", "xST"]


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
    reader.stream = engine.stream([5, 6, 7], greedy(2), request_id="x")
    assert drain(engine) == {}
    reader.stream = None
    assert engine.generate([5, 6, 7], greedy(2), request_id="x").finish_reason == "length"


def test_a_stream_that_had_ended_when_a_reader_closed_it_swallows_nothing_later(make_engine: MakeEngine) -> None:
    """It waits, ended but unread, while another request's step runs; then its id is used again."""
    reader = ClosesAtFinish()
    engine = make_engine(trace_config=TraceConfig(readers=(reader,)))
    ended = engine.stream([5, 6, 7], greedy(1), request_id="x")
    engine.step()
    reader.stream = ended
    engine.generate([5, 6, 7], greedy(2), request_id="y")
    reader.stream = None
    engine.add_request([5, 6, 7], greedy(2), request_id="x")
    assert drain(engine)["x"].finish_reason == "length"


def test_a_stream_that_another_thread_lets_go_of_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    box = [engine.stream([5, 6, 7], greedy(50), request_id="x")]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert drain(engine) == {}
    assert engine.stats().num_finished == {"abort": 1} and engine.stats().num_steps == 1


def test_what_a_reader_of_the_output_does_to_it_changes_no_later_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.generate([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1))
    last: Any = None
    for last in engine.stream([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1)):
        if not last.finished:
            last.outputs[0].logprobs[0].clear()
            last.prompt_logprobs[1].clear()
    assert (last.outputs, last.prompt_logprobs) == (expected.outputs, expected.prompt_logprobs)


def test_a_stream_is_ready_while_an_output_waits_in_its_mailbox(engine: LLMEngine) -> None:
    first, second = engine.stream([1, 2], greedy(2)), engine.stream([3], greedy(1))
    assert not first.is_ready()
    list(second)
    assert first.is_ready()
    assert [len(output.token_ids) for output in first] == [1, 2]
    assert not first.is_ready()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_cannot_be_copied_because_its_outputs_are_read_once(
    engine: LLMEngine, copied: Callable[[Any], Any]
) -> None:
    stream = engine.stream([1, 2], greedy(2))
    with pytest.raises(TypeError, match="cannot be copied"):
        copied(stream)
    assert [len(output.token_ids) for output in stream] == [1, 2]
