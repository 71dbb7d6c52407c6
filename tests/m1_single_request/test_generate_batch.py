"""`generate_batch`: answers in order of submission, an error for each bad prompt, and a progress bar on request."""

import io
import re
import threading
from collections import deque
from functools import partial
from typing import Any

import pytest
from tqdm import tqdm

from m1_single_request import (
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    LLMEngine,
    PartError,
    SamplingParams,
    llm_engine,
)
from tests.m1_single_request.engines import drain, greedy

PROMPTS: list[Any] = ["one", [7, 8, 9], "three", "one"]


def test_an_empty_batch_is_empty(engine: LLMEngine) -> None:
    assert engine.generate_batch([], greedy(3)) == {}
    assert engine.stats().num_steps == 0


@pytest.mark.parametrize(
    ("bad", "params", "error"),
    [
        *[
            (bad, greedy(4), InvalidPromptError)
            for bad in ("", [], [10**6], [-1], 5, None, b"bytes", "\ud800", deque([10**6]))
        ],
        ("two", greedy(4, stop_token_ids=[10**6]), InvalidParamsError),
        ("two", greedy(4, n=2), InvalidParamsError),
    ],
    ids=repr,
)
def test_one_bad_prompt_of_a_batch_fails_alone(
    engine: LLMEngine, bad: Any, params: SamplingParams, error: type[Exception]
) -> None:
    first, failed, last = engine.generate_batch(["one", bad, "three"], [greedy(4), params, greedy(4)]).values()
    assert (failed.finished, failed.finish_reason, failed.token_ids, failed.text) == (True, "error", (), "")
    assert isinstance(failed.error, error)
    assert first.token_ids == engine.generate("one", greedy(4)).token_ids
    assert last.token_ids == engine.generate("three", greedy(4)).token_ids
    assert engine.stats().num_finished == {"length": 4}, "a refused prompt never was a request"


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
    assert len(engine.generate_batch(PROMPTS, greedy(2), progress=asked)) == 4
    wanted = asked is True or (asked is None and terminal and patience == 0)
    assert ("requests" in stderr.getvalue() and "/4" in stderr.getvalue()) == wanted
    assert capsys.readouterr() == ("", ""), "and nothing anywhere else"


def test_the_bar_counts_refused_prompts_and_reaches_its_end(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, terminal=True)
    monkeypatch.setattr(llm_engine, "ProgressBar", partial(llm_engine.ProgressBar, mininterval=0, miniters=1))
    engine.generate_batch(["one", "", "three"], [greedy(1), greedy(1), greedy(3)], progress=True)
    counts = [int(count) for count in re.findall(r"(\d)/3", stderr.getvalue())]
    assert counts[0] == 1 and counts[-1] == 3 and counts == sorted(counts)


def test_a_failing_batch_takes_its_bar_away(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr(monkeypatch, terminal=True)
    monkeypatch.setattr(engine.engine_core.scheduler, "schedule", lambda: 1 / 0)
    outputs = engine.generate_batch(PROMPTS, greedy(9), progress=True)
    assert {type(output.error) for output in outputs.values()} == {PartError}
    assert "requests" in stderr.getvalue() and stderr.getvalue().endswith("\r"), "the line is cleared"


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
