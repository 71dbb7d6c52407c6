"""When something breaks inside: the requests of that step fail with it, what they held is freed, the engine goes on."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from m1_single_request import EngineDeadError, EngineError, ForwardError, LLMEngine, PartError
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.engine_core import EngineCore
from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.scheduler import Scheduler, SchedulerOutput
from tests.m1_single_request.engines import MakeEngine, drain, failing_runner, greedy, held

PROMPT = [31, 32, 33]
BOOM = RuntimeError("the forward broke")


@pytest.fixture
def expected(make_engine: MakeEngine) -> tuple[int, ...]:
    """What a healthy engine answers to PROMPT."""
    return make_engine().generate(PROMPT, greedy(6)).token_ids


def run_three(engine: LLMEngine) -> list[Any]:
    """PROMPT as `a`, `b`, `c`, stepped to the end; nothing may be held after any request's end."""
    for rid in ("a", "b", "c"):
        engine.add_request(PROMPT, greedy(6), request_id=rid)
    last = drain(engine)
    assert held(engine) == 0
    return [last[rid] for rid in ("a", "b", "c")]


@pytest.mark.parametrize("after_forward", [False, True], ids=["before its KV exists", "with its KV in place"])
@pytest.mark.parametrize(("position", "kept"), [(0, 0), (len(PROMPT), 1), (len(PROMPT) + 3, 4)])
def test_a_failed_forward_fails_its_request_alone(
    make_engine: MakeEngine, expected: tuple[int, ...], position: int, kept: int, after_forward: bool
) -> None:
    runner = failing_runner(BOOM, rid="b", position=position, after_forward=after_forward)
    engine = make_engine({"model_runner": runner})
    first, failed, last = run_three(engine)
    assert failed.finished and failed.finish_reason == "error"
    assert failed.error is BOOM
    assert failed.token_ids == expected[:kept]
    assert first.token_ids == last.token_ids == expected
    assert first.error is None and last.error is None
    assert engine.stats().num_finished == {"length": 2, "error": 1}
    assert engine.generate(PROMPT, greedy(6)).token_ids == expected


def test_the_failed_step_frees_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine({"model_runner": failing_runner(BOOM, rid="b", position=4, after_forward=True)})
    engine.add_request(PROMPT, greedy(6), request_id="b")
    engine.step()
    engine.step()
    assert held(engine) == 4
    assert engine.step()["b"].finish_reason == "error"
    assert held(engine) == 0
    assert not engine.has_unfinished_requests()


def test_every_way_to_ask_reports_the_error_in_the_output(make_engine: MakeEngine) -> None:
    def engine() -> LLMEngine:
        return make_engine({"model_runner": failing_runner(BOOM, rid="req-0", position=4)})

    assert engine().generate(PROMPT, greedy(6)).error is BOOM
    outputs = list(engine().generate_batch([PROMPT, PROMPT], greedy(6)).values())
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    streamed = list(engine().stream(PROMPT, greedy(6)))
    assert [output.finish_reason for output in streamed] == [None, None, "error"]
    assert streamed[-1].error is BOOM


def test_a_failed_sampler_fails_its_request_alone(make_engine: MakeEngine, expected: tuple[int, ...]) -> None:
    class FailingSampler(Sampler):
        calls = 0

        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
            self.calls += 1
            if self.calls == 8:  # the second token of `b`
                raise BOOM
            return super().__call__(logits, metadata)

    first, failed, last = run_three(make_engine({"sampler": FailingSampler}))
    assert (failed.error, failed.token_ids) == (BOOM, expected[:1])
    assert first.token_ids == last.token_ids == expected


def test_a_failed_preparation_fails_its_request_alone(make_engine: MakeEngine, expected: tuple[int, ...]) -> None:
    class FailingRunner(ModelRunner):
        def prepare_inputs(self, scheduler_output: SchedulerOutput) -> ModelInputs:
            if scheduler_output.request_id == "b":
                raise BOOM
            return super().prepare_inputs(scheduler_output)

    first, failed, last = run_three(make_engine({"model_runner": FailingRunner}))
    assert failed.error is BOOM
    assert first.token_ids == last.token_ids == expected


def test_an_abort_in_the_step_that_fails_stays_an_abort(make_engine: MakeEngine) -> None:
    class AbortingRunner(ModelRunner):
        def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]:
            engine.abort_request("a")
            raise BOOM

    engine = make_engine({"model_runner": AbortingRunner})
    engine.add_request(PROMPT, greedy(6), request_id="a")
    output = drain(engine)["a"]
    assert (output.finish_reason, output.error) == ("abort", None)


# --- logits that are no numbers ---------------------------------------------------------------------------------------


def spoiling_runner(spoil: Callable[[Tensor], Any], call: int) -> type[ModelRunner]:
    """A runner whose model's logits are spoilt at the given call."""

    class SpoilingRunner(ModelRunner):
        def __init__(self, **parts: Any) -> None:
            super().__init__(**parts)
            model, calls = self.model, []

            def spoilt(**inputs: Any) -> Any:
                calls.append(1)
                logits = model(**inputs).logits.clone()
                if len(calls) == call:
                    spoil(logits)
                return SimpleNamespace(logits=logits)

            spoilt.config = model.config  # type: ignore[attr-defined]
            self.model = spoilt

    return SpoilingRunner


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
def test_logits_that_are_no_numbers_fail_the_request(
    make_engine: MakeEngine, expected: tuple[int, ...], value: float, params: dict[str, Any]
) -> None:
    runner = spoiling_runner(lambda logits: logits[0, -1].__setitem__(17, value), call=3)
    engine = make_engine({"model_runner": runner})
    output = engine.generate(PROMPT, greedy(6, **params))
    assert isinstance(output.error, ForwardError)
    assert output.request_id in str(output.error)
    assert len(output.token_ids) == 2
    assert held(engine) == 0
    assert engine.generate(PROMPT, greedy(6)).token_ids == expected


# --- a lost device ----------------------------------------------------------------------------------------------------


def lose_device(logits: Tensor) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


@pytest.mark.parametrize("raised_by", ["runner", "torch"])
def test_a_lost_device_fails_every_request_and_then_every_call(make_engine: MakeEngine, raised_by: str) -> None:
    if raised_by == "runner":
        runner = failing_runner(EngineDeadError("the device is gone"), rid="a", position=len(PROMPT))
    else:
        runner = spoiling_runner(lose_device, call=2)
    engine = make_engine({"model_runner": runner})
    for rid in ("a", "b", "c"):
        engine.add_request(PROMPT, greedy(6), request_id=rid)
    stream = engine.stream("streamed", greedy(6))
    engine.step()
    outputs = engine.step()
    assert list(outputs) == ["a", "b", "c"]
    streamed = list(stream)
    assert len(streamed) == 1
    for output in [*outputs.values(), *streamed]:
        assert output.finish_reason == "error"
        assert isinstance(output.error, EngineDeadError)
    assert [len(output.token_ids) for output in outputs.values()] == [1, 0, 0]
    assert held(engine) == 0
    assert not engine.has_unfinished_requests()
    for call in (
        lambda: engine.generate("a", greedy(1)),
        lambda: engine.stream("a", greedy(1)),
        lambda: engine.add_request("a", greedy(1)),
        lambda: engine.generate_batch(["a"], greedy(1)),
        lambda: engine.step(),
    ):
        with pytest.raises(EngineDeadError):
            call()
    assert engine.stats().num_finished == {"error": 4}
    engine.close()


# --- errors outside model and sampler ---------------------------------------------------------------------------------


class FailsToUpdate(Scheduler):
    """Raises at its third update, when the token is committed."""

    num_updates = 0

    def update_from_output(self, scheduler_output: Any, sampled: Any) -> list[Request]:
        changed = super().update_from_output(scheduler_output, sampled)
        self.num_updates += 1
        if self.num_updates == 3:
            raise RuntimeError("the update broke")
        return changed


def test_an_error_in_an_update_ends_all_requests_with_the_name_of_the_part(
    make_engine: MakeEngine, expected: tuple[int, ...]
) -> None:
    engine = make_engine({"scheduler": FailsToUpdate})
    outputs = run_three(engine)
    for output in outputs:
        assert output.finish_reason == "error" and isinstance(output.error, PartError)
        assert re.fullmatch(
            r"the part 'scheduler' \(FailsToUpdate\), in line \d+ of test_failures.py, failed: "
            r"RuntimeError\('the update broke'\)",
            str(output.error),
        )
    assert [output.token_ids for output in outputs] == [expected[:3], (), ()]
    assert engine.stats().num_finished == {"error": 3} and engine.stats().num_output_tokens == 3
    assert engine.generate(PROMPT, greedy(6)).token_ids == expected


class Mute(Exception):
    """An error that has no text: `str` and `repr` of it raise."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


def test_an_error_without_a_text_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine_core.scheduler, "schedule", lambda: raise_(Mute()))
        error = engine.generate(PROMPT, greedy(6)).error
    assert isinstance(error, PartError) and "failed: a Mute" in str(error)
    assert engine.generate(PROMPT, greedy(6)).token_ids == expected


def raise_(error: Exception) -> None:
    raise error


def test_an_error_outside_all_parts_is_the_engine_s(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        raise RuntimeError("the step broke")

    engine = make_engine({"engine_core": partial(EngineCore)})  # so the core is of no class in the table
    monkeypatch.setattr(engine.engine_core, "step", step)
    error = engine.generate(PROMPT, greedy(6)).error
    assert isinstance(error, PartError) and str(error) == "the engine failed: RuntimeError('the step broke')"


def test_errors_of_ours_have_one_root() -> None:
    assert issubclass(ForwardError, EngineError) and issubclass(EngineDeadError, EngineError)


# --- text that cannot be made -----------------------------------------------------------------------------------------


class CannotRead(IncrementalDetokenizer):
    """Fails whenever text is asked for that a token of 3 and more belongs to."""

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
    assert engine.generate(PROMPT, greedy(2)).finish_reason == "length"


class FailsToName(IncrementalDetokenizer):
    """Cannot name a token, once."""

    failed = False

    def token_text(self, token_id: int) -> str:
        if not type(self).failed:
            type(self).failed = True
            raise ValueError("no name")
        return super().token_text(token_id)


def test_a_part_that_fails_in_the_middle_of_a_commit_fails_only_its_request(make_engine: MakeEngine) -> None:
    FailsToName.failed = False
    engine = make_engine({"detokenizer": FailsToName})
    outputs = engine.generate_batch([PROMPT, PROMPT], greedy(3, logprobs=1))
    first, second = outputs.values()
    assert (first.finish_reason, str(first.error), first.token_ids) == ("error", "no name", ())
    assert (second.finish_reason, len(second.token_ids)) == ("length", 3)
