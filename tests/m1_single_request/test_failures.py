"""Errors of m1's own parts: the preparation of inputs, text that is read late, an error without a text.

What every milestone does when a step breaks is tested in `tests/engine_contract`.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from m1_single_request import LLMEngine, PartError
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.engine_core import EngineCore
from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.scheduler import SchedulerOutput
from tests.m1_single_request.engines import MakeEngine, greedy, held

PROMPT = [31, 32, 33]


def test_a_failed_preparation_fails_its_request_alone(make_engine: MakeEngine) -> None:
    error = RuntimeError("the preparation broke")

    class FailingRunner(ModelRunner):
        def prepare_inputs(self, scheduler_output: SchedulerOutput) -> ModelInputs:
            if scheduler_output.request_id == "req-1":
                raise error
            return super().prepare_inputs(scheduler_output)

    outputs = make_engine({"model_runner": FailingRunner}).generate_batch([PROMPT] * 3, greedy(6))
    assert [output.error for output in outputs.values()] == [None, error, None]
    assert len({output.token_ids for output in outputs.values() if output.error is None}) == 1


# --- errors outside model and sampler ---------------------------------------------------------------------------------


class Mute(Exception):
    """An error that has no text: `str` and `repr` of it raise."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


def failing_step(engine: LLMEngine, part: Any, method: str, error: Exception, patch: pytest.MonkeyPatch) -> Any:
    """The error of a request whose step calls a method that raises; the next request has its answer."""

    def fail() -> Any:
        raise error

    with patch.context() as patched:
        patched.setattr(part, method, fail)
        found = engine.generate(PROMPT, greedy(6)).error
    assert isinstance(found, PartError) and engine.generate(PROMPT, greedy(6)).error is None
    return found


def test_an_error_without_a_text_ends_all_requests_and_the_engine_goes_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = failing_step(engine, engine.engine_core.scheduler, "schedule", Mute(), monkeypatch)
    assert "failed: a Mute" in str(found)


def test_an_error_outside_all_parts_is_the_engine_s(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine({"engine_core": partial(EngineCore)})  # so the core is of no class in the table
    found = failing_step(engine, engine.engine_core, "step", RuntimeError("the step broke"), monkeypatch)
    assert str(found) == "the engine failed: RuntimeError('the step broke')"


# --- text that cannot be made -----------------------------------------------------------------------------------------


class CannotRead(IncrementalDetokenizer):
    """Fails whenever text is read that a third token belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pushed = 0

    def push(self, token_id: int) -> None:
        self.pushed += 1
        super().push(token_id)

    @property
    def text(self) -> str:
        if self.pushed >= 3:
            raise ValueError("no such token")
        return super().text


@pytest.mark.parametrize("traced", [False, True])
def test_a_tokenizer_that_fails_spoils_no_other_request(make_engine: MakeEngine, traced: bool) -> None:
    engine = make_engine({"detokenizer": CannotRead})
    if traced:
        engine.tracer.attach(SimpleNamespace(read=lambda record: None, close=lambda: None))
    outputs = engine.generate_batch([PROMPT] * 3, [greedy(2), greedy(6), greedy(2)])
    assert [output.finish_reason for output in outputs.values()] == ["length", "error", "length"]
    failed = outputs["req-1"]
    assert isinstance(failed.error, ValueError) and failed.text == ""
    assert held(engine) == 0 and not engine.has_unfinished_requests()
    assert engine.stats().num_finished == {"length": 2, "error": 1}


def test_a_stream_whose_text_fails_ends_with_the_error(make_engine: MakeEngine) -> None:
    engine = make_engine({"detokenizer": CannotRead})
    seen = list(engine.stream(PROMPT, greedy(6)))
    assert [len(output.token_ids) for output in seen[:-1]] == [1, 2]
    assert seen[-1].finish_reason == "error" and isinstance(seen[-1].error, ValueError)
    assert held(engine) == 0
