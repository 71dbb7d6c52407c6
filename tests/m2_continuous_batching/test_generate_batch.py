"""`generate_batch`: everybody runs together, comes back in the order of submission, and answers for himself alone."""

import io
import re
import signal
import threading
from functools import partial
from typing import Any

import pytest
from tqdm import tqdm

from m1_single_request import llm_engine
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.request import Request
from m2_continuous_batching import (
    DuplicateRequestError,
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    LLMEngine,
    PartError,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
)
from tests.m2_continuous_batching.engines import MakeEngine, Recorder, check_drained, drain, greedy, limits, run

PROMPTS = [[5, 6, 7], "two", [9], "four and a few more", [3, 1, 4, 1, 5]]


@pytest.fixture
def alone(make_m1: Any) -> Any:
    """m1, which answers one after the other."""
    return make_m1()


# --- order and parameters ---------------------------------------------------------------------------------------------


def test_answers_come_in_order_of_submission_whoever_ends_first(
    make_engine: MakeEngine, alone: Any, execution: str
) -> None:
    engine = make_engine(**limits(3, execution=execution))
    params = [greedy(n) for n in (9, 2, 5, 1, 7)]
    outputs = engine.generate_batch(PROMPTS, params)
    assert list(outputs) == [f"req-{n}" for n in range(5)]
    assert all(rid == output.request_id and output.finished for rid, output in outputs.items())
    assert [output.prompt for output in outputs.values()] == [None, "two", None, "four and a few more", None]
    expected = alone.generate_batch(PROMPTS, params).values()
    assert [o.token_ids for o in outputs.values()] == [o.token_ids for o in expected]
    assert [o.text for o in outputs.values()] == [o.text for o in expected]
    check_drained(engine)


def test_the_whole_batch_is_queued_before_the_first_step(engine: LLMEngine) -> None:
    recorder = Recorder(engine.tracer)
    engine.generate_batch(PROMPTS, greedy(2))
    assert [len(batch.rids) for batch in recorder.events("batch")] == [5, 5]


def test_prompts_may_be_repeated_and_each_gets_its_answer(engine: LLMEngine) -> None:
    outputs = list(engine.generate_batch([[5, 6]] * 20, greedy(3)).values())
    assert len(outputs) == 20 and len({output.token_ids for output in outputs}) == 1


def test_an_empty_batch_is_empty(engine: LLMEngine) -> None:
    assert engine.generate_batch([]) == {}
    assert engine.stats().num_steps == 0


def test_a_batch_runs_beside_what_was_there_before(make_engine: MakeEngine, alone: Any) -> None:
    engine = make_engine(**limits(3))
    mine = engine.add_request([8, 8], greedy(12))
    stream = engine.stream([9, 9], greedy(12))
    outputs = engine.generate_batch(PROMPTS, greedy(3))
    assert mine not in outputs and stream.request_id not in outputs and len(outputs) == 5
    *_, last = stream
    assert last.token_ids == alone.generate([9, 9], greedy(12)).token_ids
    assert drain(engine)[mine].token_ids == alone.generate([8, 8], greedy(12)).token_ids


# --- one bad prompt ---------------------------------------------------------------------------------------------------


def test_bad_prompts_and_parameters_get_an_error_and_the_others_run(
    make_engine: MakeEngine, alone: Any, execution: str
) -> None:
    engine = make_engine(**limits(2, 12, execution))
    asked: list[tuple[Any, SamplingParams, type | None]] = [
        ([5, 6, 7], greedy(4), None),
        (list(range(13)), greedy(4), PromptTooLongError),  # over the budget
        ("", greedy(4), InvalidPromptError),
        ([9], greedy(4), None),
        ([10**6], greedy(4), InvalidPromptError),
        ([9], greedy(4, n=2), InvalidParamsError),
        (None, greedy(4), InvalidPromptError),
        (list(range(12)), greedy(4), None),  # all of the budget
        ([9], greedy(4, stop_token_ids=[10**6]), InvalidParamsError),
    ]
    outputs = engine.generate_batch([prompt for prompt, _, _ in asked], [params for _, params, _ in asked])
    assert list(outputs) == [f"req-{n}" for n in range(len(asked))]
    for (prompt, params, error), output in zip(asked, outputs.values(), strict=True):
        assert output.finished
        if error is None:
            assert output.error is None and output.token_ids == alone.generate(prompt, params).token_ids
        else:
            assert (output.finish_reason, output.token_ids, output.text) == ("error", (), "")
            assert type(output.error) is error
    assert "13" in str(outputs["req-1"].error) and "12" in str(outputs["req-1"].error)
    assert engine.stats().num_finished == {"length": 3}, "who was refused never was a request"
    check_drained(engine)


def test_a_batch_of_bad_prompts_takes_no_step(engine: LLMEngine) -> None:
    outputs = engine.generate_batch(["", [-1], []])
    assert [output.finish_reason for output in outputs.values()] == ["error"] * 3
    assert engine.stats().num_steps == 0


def test_a_refused_prompt_changes_no_other_draw(make_engine: MakeEngine, alone: Any) -> None:
    """A seed is derived from the request's number, and who is refused has one, too."""
    params = SamplingParams(max_tokens=6, temperature=1.0)
    outputs = list(make_engine(**limits(4)).generate_batch([[5], "", [6]], params).values())
    expected = list(alone.generate_batch([[5], [7], [6]], params).values())
    assert [outputs[n].token_ids for n in (0, 2)] == [expected[n].token_ids for n in (0, 2)]


@pytest.mark.parametrize(
    ("prompts", "params"), [(["a", "b"], [SamplingParams()]), ("ab", None), (None, None), (["a"], 5)], ids=repr
)
def test_a_batch_that_makes_no_sense_raises_before_anything_changes(
    engine: LLMEngine, prompts: Any, params: Any
) -> None:
    with pytest.raises(InvalidRequestError):
        engine.generate_batch(prompts, params)
    assert not engine.has_unfinished_requests()


def test_an_interrupted_batch_gives_up_all_its_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(2))
    mine = engine.add_request([8, 8], greedy(4))

    class Interrupting:
        def read(self, record: Any) -> None:
            if record.step == 3:
                engine.tracer.detach(self)
                signal.raise_signal(signal.SIGINT)

        def close(self) -> None:
            """Nothing to close."""

    engine.tracer.attach(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(PROMPTS, greedy(9))
    last = run(engine)
    assert list(last) == [mine] and last[mine].finish_reason == "length"
    assert engine.stats().num_finished == {"length": 1, "abort": 5}


def test_ids_of_a_batch_keep_clear_of_chosen_ones(engine: LLMEngine) -> None:
    engine.add_request([5], greedy(1), request_id="req-2")
    outputs = engine.generate_batch(PROMPTS, greedy(2))
    assert len(outputs) == 5 and "req-2" not in outputs
    with pytest.raises(DuplicateRequestError):
        engine.add_request([5], greedy(1), request_id="req-2")
    assert engine.step()["req-2"].finished


# --- only whole answers are made --------------------------------------------------------------------------------------


def test_no_output_is_made_before_the_last(make_engine: MakeEngine) -> None:
    made: list[tuple[str, bool]] = []

    class Counting(OutputProcessor):
        def make_output(self, request: Request) -> RequestOutput:
            made.append((request.request_id, request.is_finished))
            return super().make_output(request)

    engine = make_engine({"output_processor": Counting}, **limits(3))
    engine.generate_batch(PROMPTS, greedy(4))
    assert sorted(made) == [(f"req-{n}", True) for n in range(5)]
    made.clear()
    list(engine.stream([5], greedy(3)))
    assert [finished for _, finished in made] == [False, False, True]


# --- the progress bar -------------------------------------------------------------------------------------------------


class Stderr(io.StringIO):
    """Standard error in memory, as a terminal or as a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        monkeypatch.setattr("sys.stderr", self)

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("patience", [0.0, 1000.0], ids=["long", "short"])
def test_a_bar_is_shown_if_asked_or_for_a_long_batch_on_a_terminal(
    engine: LLMEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    asked: bool | None,
    patience: float,
) -> None:
    monkeypatch.setattr(llm_engine, "PATIENCE", patience)
    stderr = Stderr(monkeypatch, terminal=terminal)
    outputs = engine.generate_batch(PROMPTS, greedy(2), progress=asked)
    assert len(outputs) == 5
    wanted = asked is True or (asked is None and terminal and patience == 0)
    assert ("requests" in stderr.getvalue() and "/5" in stderr.getvalue()) == wanted
    assert capsys.readouterr() == ("", ""), "and nothing anywhere else"


@pytest.mark.parametrize("asked", [None, False, True])
def test_nothing_is_written_to_stdout(
    engine: LLMEngine, capsys: pytest.CaptureFixture[str], asked: bool | None
) -> None:
    engine.generate_batch(PROMPTS, greedy(2), progress=asked)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == "" or asked is True


def test_the_bar_counts_refused_prompts_and_reaches_its_end(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, terminal=True)
    monkeypatch.setattr(llm_engine, "ProgressBar", partial(llm_engine.ProgressBar, mininterval=0, miniters=1))
    engine.generate_batch(["one", "", "three"], [greedy(1), greedy(1), greedy(3)], progress=True)
    counts = [int(count) for count in re.findall(r"(\d)/3", stderr.getvalue())]
    assert counts[0] == 1 and counts[-1] == 3 and counts == sorted(counts)


def test_a_failing_batch_takes_its_bar_away(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, terminal=True)
    schedule = engine.engine_core.scheduler.schedule
    monkeypatch.setattr(
        engine.engine_core.scheduler, "schedule", lambda: 1 / 0 if engine.stats().num_steps > 2 else schedule()
    )
    outputs = engine.generate_batch(PROMPTS, greedy(9), progress=True)
    assert {type(output.error) for output in outputs.values()} == {PartError}
    assert "requests" in stderr.getvalue() and stderr.getvalue().endswith("\r"), "the line is cleared"
    monkeypatch.undo()
    assert run(engine) == {}


@pytest.mark.parametrize("asked", [True, None])
def test_a_bar_starts_no_thread(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, asked: bool | None) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)
    before = threading.enumerate()
    engine.generate_batch(["a"], greedy(1), progress=asked)
    assert threading.enumerate() == before


@pytest.mark.parametrize(("stderr", "asked"), [(None, True), (io.StringIO(), None)], ids=["none", "closed"])
def test_without_a_stderr_there_is_no_bar(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, stderr: Any, asked: bool | None
) -> None:
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr("sys.stderr", stderr)
    outputs = engine.generate_batch(["a"], greedy(1), progress=asked)
    assert [output.error for output in outputs.values()] == [None]


@pytest.mark.parametrize("asked", [1, "yes", 0], ids=repr)
def test_progress_is_true_false_or_none(engine: LLMEngine, asked: Any) -> None:
    with pytest.raises(InvalidRequestError, match="progress="):
        engine.generate_batch(["a"], progress=asked)
    assert not engine.has_unfinished_requests()
