"""When something breaks inside a batch: who shared the step fails with it, or only who caused it; nothing stays behind.

A forward, a sampler or a preparation that raises takes the requests of its step along, because nobody can say whose
fault it was. Numbers that are no numbers belong to one row, and fail one request. Whoever waited runs on.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import m1_single_request
import m2_continuous_batching
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m2_continuous_batching import EngineDeadError, ForwardError, LLMEngine, RequestOutput, SamplingParams
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.padded import PaddedExecution
from tests.m2_continuous_batching.engines import (
    EXECUTIONS,
    MakeEngine,
    check_drained,
    check_step,
    failing_runner,
    greedy,
    held,
    limits,
    run,
    unfinished,
)

BOOM = RuntimeError("the forward broke")
PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51], "d": [61, 62], "e": [71, 72, 73, 74]}
NUM_TOKENS = {"a": 6, "b": 3, "c": 5, "d": 6, "e": 4}
"""With room for three, d joins when b has ended, and e when c has."""


@pytest.fixture
def expected(make_m1: Any) -> dict[str, tuple[int, ...]]:
    """What everybody gets if nothing breaks."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(NUM_TOKENS[rid])).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: LLMEngine, **params: SamplingParams) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, params.get(rid, greedy(NUM_TOKENS[rid])), request_id=rid)


def check_the_rest(
    engine: LLMEngine,
    last: dict[str, RequestOutput],
    expected: dict[str, tuple[int, ...]],
    failed: dict[str, int],
    error: BaseException | type | None = None,
) -> None:
    """Those who `failed` have so many tokens, the others all of theirs, and a request that comes now as well."""
    for rid, output in last.items():
        if rid in failed:
            assert (output.finish_reason, output.finished) == ("error", True)
            assert output.token_ids == expected[rid][: failed[rid]], rid
            if error is not None:
                assert output.error is error or isinstance(output.error, error if isinstance(error, type) else ())
        else:
            assert (output.finish_reason, output.error) == ("length", None)
            assert output.token_ids == expected[rid], rid
    assert last.keys() == PROMPTS.keys()
    assert engine.stats().num_finished == Counter(o.finish_reason for o in last.values())
    assert [engine.generate(PROMPTS[rid], greedy(NUM_TOKENS[rid])).token_ids for rid in "ade"] == [
        expected[rid] for rid in "ade"
    ]
    check_drained(engine)


# --- what takes the whole step along ----------------------------------------------------------------------------------


@pytest.mark.parametrize("after_forward", [False, True], ids=["before its KV exists", "with its KV in place"])
@pytest.mark.parametrize(
    ("rid", "position", "failed"),
    [
        ("a", 0, {"a": 0, "b": 0, "c": 0}),
        ("b", 6, {"a": 2, "b": 2, "c": 2}),  # in the step that would end b
        ("d", 0, {"a": 3, "c": 3, "d": 0}),  # a prefill beside decodes
        ("e", 4, {"a": 6, "d": 3, "e": 1}),  # a has ended before
    ],
)
def test_a_failed_forward_fails_the_requests_of_its_step(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    execution: str,
    rid: str,
    position: int,
    failed: dict[str, int],
    after_forward: bool,
) -> None:
    failed = {rid: count for rid, count in failed.items() if count < NUM_TOKENS[rid]}
    runner = failing_runner(BOOM, rid=rid, position=position, after_forward=after_forward)
    engine = make_engine({"model_runner": runner}, **limits(3, execution=execution))
    submit(engine)
    check_the_rest(engine, run(engine), expected, failed, BOOM)


def test_a_forward_that_breaks_between_two_layers_leaves_nothing_behind(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    """Some of the step's keys are in the slots already."""
    engine = make_engine(**limits(3))
    submit(engine)
    engine.step()
    execution = engine.engine_core.executor.worker.model_runner.execution
    last_layer, update = execution.cache.layers[-1], execution.cache.layers[-1].update

    def broken(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        last_layer.update = update
        raise BOOM

    last_layer.update = broken
    outputs = engine.step()
    check_step(engine)
    assert {rid: o.finish_reason for rid, o in outputs.items()} == dict.fromkeys("abc", "error")
    assert held(engine) == 0 and not execution.cache.key_cache.any() and not execution.cache.value_cache.any()
    check_the_rest(engine, outputs | run(engine), expected, {"a": 1, "b": 1, "c": 1}, BOOM)


def test_a_failed_sampler_fails_the_requests_of_its_step(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class FailingSampler(Sampler):
        calls = 0

        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
            self.calls += 1
            if self.calls == 2:
                raise BOOM
            return super().__call__(logits, metadata)

    engine = make_engine({"sampler": FailingSampler}, **limits(3))
    submit(engine)
    check_the_rest(engine, run(engine), expected, {"a": 1, "b": 1, "c": 1}, BOOM)


def test_an_abort_in_the_step_that_fails_stays_an_abort(make_engine: MakeEngine) -> None:
    class AbortingExecutor(GPUExecutor):
        def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
            if "b" in input_batch.req_ids:
                engine.abort_request("b")
                raise BOOM
            return super().execute_model_batch(input_batch)

    engine = make_engine({"executor": AbortingExecutor}, **limits(3))
    submit(engine)
    ends = {rid: (output.finish_reason, output.error) for rid, output in run(engine).items()}
    assert ends["b"] == ("abort", None) and ends["a"] == ends["c"] == ("error", BOOM)
    assert ends["d"] == ends["e"] == ("length", None)


def test_every_way_to_ask_reports_the_error_in_the_output(make_engine: MakeEngine) -> None:
    def engine() -> LLMEngine:
        return make_engine({"model_runner": failing_runner(BOOM, rid="req-0", position=4)}, **limits(2))

    prompt = [5, 6, 7]
    assert engine().generate(prompt, greedy(6)).error is BOOM
    outputs = list(engine().generate_batch([prompt] * 3, greedy(6)).values())
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    streamed = list(engine().stream(prompt, greedy(6)))
    assert [output.finish_reason for output in streamed] == [None, None, "error"]


# --- what fails one request -------------------------------------------------------------------------------------------


@torch.inference_mode()
def spoil_slot(engine: LLMEngine, rid: str, value: float) -> None:
    """Put a number that is none into the first key of a request."""
    execution = engine.engine_core.executor.worker.model_runner.execution
    if isinstance(execution, PaddedExecution):
        execution.cache.key_cache[0, execution.slots[rid], 0, 0, 0] = value
    else:
        execution.runner.request_caches[rid].layers[0].keys[0, 0, 0, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "drawn"])
def test_kv_that_is_no_number_fails_its_request_alone(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    execution: str,
    value: float,
    params: dict[str, Any],
) -> None:
    engine = make_engine(**limits(3, execution=execution))
    submit(engine, b=greedy(NUM_TOKENS["b"], **params))
    last = engine.step()
    spoil_slot(engine, "b", value)
    last |= run(engine)
    assert isinstance(last["b"].error, ForwardError) and "'b'" in str(last["b"].error)
    assert len(last["b"].token_ids) == 1
    expected["b"] = last["b"].token_ids
    check_the_rest(engine, last, expected, {"b": 1}, ForwardError)  # d got the slot of b


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_prompt_that_makes_no_numbers_fails_alone_and_cannot_spoil_its_slot(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], execution: str
) -> None:
    """The weights hold NaN for one token; its prompt is padded, so that NaN stands behind its end as well."""
    poison = 3000
    engine = make_engine(**limits(3, execution=execution))
    weight = engine.engine_core.executor.worker.model_runner.model.get_input_embeddings().weight
    before = weight[poison].clone()
    with torch.no_grad():
        weight[poison] = torch.nan
    try:
        for rid, prompt in PROMPTS.items():
            prompt = [prompt[0], poison, *prompt[1:]] if rid in ("a", "d") else prompt
            engine.add_request(prompt, greedy(NUM_TOKENS[rid], prompt_logprobs=1), request_id=rid)
        last = run(engine)
        check_the_rest(engine, last, expected, {"a": 0, "d": 0}, ForwardError)
    finally:
        with torch.no_grad():
            weight[poison] = before


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_settings_that_leave_no_token_fail_their_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], execution: str, temperature: float
) -> None:
    every = range(4096 + 200)
    engine = make_engine(**limits(3, execution=execution))
    vocab_size = engine.engine_core.input_processor.vocab_size
    impossible = greedy(5, min_tokens=3, stop_token_ids=list(every[:vocab_size]), temperature=temperature)
    submit(engine, b=impossible, d=impossible)
    last = run(engine)
    assert "no token can be sampled for 'b'" in str(last["b"].error)
    check_the_rest(engine, last, expected, {"b": 0, "d": 0}, ForwardError)


def test_a_part_that_fails_while_tokens_are_committed_fails_its_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], execution: str
) -> None:
    class FailsToName(IncrementalDetokenizer):
        def token_text(self, token_id: int) -> str:
            raise BOOM

    engine = make_engine({"detokenizer": FailsToName}, **limits(3, execution=execution))
    submit(engine, b=greedy(3, logprobs=1), d=greedy(3, logprobs=1))
    check_the_rest(engine, run(engine), expected, {"b": 0, "d": 0}, BOOM)


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [EngineDeadError("the device is gone"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["runner", "torch"],
)
def test_a_lost_device_fails_every_request_and_then_every_call(
    make_engine: MakeEngine, execution: str, error: Exception
) -> None:
    engine = make_engine({"model_runner": failing_runner(error, rid="a", position=3)}, **limits(2, execution=execution))
    submit(engine)
    stream = engine.stream([5], greedy(9))
    engine.step()
    outputs = engine.step()
    assert outputs.keys() == PROMPTS.keys()
    streamed = list(stream)
    assert len(streamed) == 1
    for output in [*outputs.values(), *streamed]:
        assert output.finish_reason == "error" and isinstance(output.error, EngineDeadError)
    assert {rid: len(output.token_ids) for rid, output in outputs.items()} == {"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}
    check_drained(engine)
    for call in (
        lambda: engine.generate("a", greedy(1)),
        lambda: engine.stream("a", greedy(1)),
        lambda: engine.add_request("a", greedy(1)),
        lambda: engine.generate_batch(["a"], greedy(1)),
        lambda: engine.step(),
    ):
        with pytest.raises(EngineDeadError):
            call()
    assert engine.stats().num_finished == {"error": 6}
    engine.close()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_forward", [False, True], ids=["before its KV exists", "with its KV in place"])
@pytest.mark.parametrize(("rid", "position"), [("a", 0), ("b", 6), ("d", 0), ("e", 5)])
def test_an_interrupted_step_can_be_repeated(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    execution: str,
    rid: str,
    position: int,
    after_forward: bool,
) -> None:
    runner = failing_runner(KeyboardInterrupt(), rid=rid, position=position, after_forward=after_forward)
    engine = make_engine({"model_runner": runner}, **limits(3, execution=execution))
    submit(engine)
    interrupts, last = 0, {}
    for _ in unfinished(engine):
        try:
            last |= engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        else:
            check_step(engine)
    assert interrupts == 1
    check_the_rest(engine, last, expected, {})


def test_an_interrupt_before_the_release_does_not_cost_the_slot_s_next_owner_its_kv(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    """b has ended and its slot is free to take, but what stands in it is not released yet."""

    class InterruptedProcessor(OutputProcessor):
        left = 1

        def make_output(self, request: Request) -> RequestOutput:
            if request.is_finished and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return super().make_output(request)

    engine = make_engine({"output_processor": InterruptedProcessor}, **limits(3))
    submit(engine)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    check_the_rest(engine, run(engine), expected, {})


class Interrupts:
    """Ctrl-C at one of the places where Python looks for signals: as a function begins, or as a call of C returns."""

    def __init__(self, place: tuple[Any, ...] | None = None, nth: int = 1) -> None:
        self.place, self.nth = place, nth
        self.seen: Counter[tuple[Any, ...]] = Counter()
        self.came = False

    @contextmanager
    def within(self) -> Iterator[None]:
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.came or event not in ("call", "c_return") or not code.co_filename.startswith(ENGINE_DIRECTORIES):
            return
        place = code.co_filename, code.co_qualname, frame.f_lineno, event
        self.seen[place] += 1
        if place == self.place and self.seen[place] == self.nth:
            self.came = True
            raise KeyboardInterrupt


ENGINE_DIRECTORIES = tuple(str(package.__path__[0]) for package in (m1_single_request, m2_continuous_batching))


def serve_through(engine: LLMEngine, interrupts: Interrupts) -> dict[str, RequestOutput]:
    """Serve the five requests, abort one, and go on after the interrupt as if nothing had been."""
    submit(engine)
    last: dict[str, RequestOutput] = {}
    for number, _ in enumerate(unfinished(engine)):
        if number == 3:
            engine.abort_request("d")
        try:
            with interrupts.within():
                last |= engine.step()
        except KeyboardInterrupt:
            continue
        engine.engine_core.scheduler.check_invariants()
    engine.step()
    check_drained(engine)
    return last


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], execution: Any
) -> None:
    setting = limits(3, 6, execution)
    uninterrupted = Interrupts()
    serve_through(make_engine(**setting), uninterrupted)
    rng = Random(3)
    places = [place for place in uninterrupted.seen if "listcomp" not in place[1] and "genexpr" not in place[1]]
    assert len(places) > 100
    for place in rng.sample(places, 60 if execution == "padded" else 15):
        interrupts = Interrupts(place, rng.randint(1, uninterrupted.seen[place]))
        engine = make_engine(**setting)
        try:
            last = serve_through(engine, interrupts)
            assert interrupts.came
            assert last.keys() == PROMPTS.keys() and all(output.finished for output in last.values())
            for rid, output in last.items():
                assert output.error is None and output.token_ids == expected[rid][: len(output.token_ids)], rid
                assert output.finish_reason != "length" or output.token_ids == expected[rid], rid
            assert engine.generate(PROMPTS["a"], greedy(6)).token_ids == expected["a"]
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {place}, {interrupts.nth}: {error!r}") from error
