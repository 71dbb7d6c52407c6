"""When something breaks inside a step: who shared it fails with it, or only who caused it; nothing stays behind.

A forward, a sampler or a move of blocks that raises takes the requests of its step along, because nobody can say whose
fault it was. Numbers that are no numbers belong to one row, and fail one request. Whoever waited runs on.
"""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.output_processor import OutputProcessor as SingleRequestOutputProcessor
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler, SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention import (
    EngineClosedError,
    EngineDeadError,
    ForwardError,
    LLMEngine,
    ModelConfig,
    RequestOutput,
    SamplingParams,
)
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.output_processor import OutputProcessor
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.request import ParentRequest
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.m3_paged_attention.engines import (
    MakeEngine,
    Moment,
    check_drained,
    check_step,
    failing_runner,
    greedy,
    run,
    runner_of,
    setting,
    unfinished,
)

BOOM = RuntimeError("the forward broke")
PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51], "d": [61, 62], "e": [71, 72, 73, 74]}
NUM_TOKENS = {"a": 6, "b": 3, "c": 5, "d": 6, "e": 4}
"""With room for three, d joins when b has ended, and e when c has."""
MOMENTS: tuple[Moment, ...] = ("before", "forward", "after")


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


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize(
    ("rid", "position", "failed"),
    [
        ("a", 0, {"a": 0, "b": 0, "c": 0}),
        ("b", 6, {"a": 2, "b": 2, "c": 2}),  # in the step that would end b
        ("d", 0, {"a": 3, "c": 3, "d": 0}),  # a prefill beside decodes
        ("e", 4, {"d": 3, "e": 1}),  # a has ended before
    ],
)
def test_a_failed_step_fails_the_requests_of_that_step(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    rid: str,
    position: int,
    failed: dict[str, int],
    at: Moment,
) -> None:
    engine = make_engine(
        {"model_runner": failing_runner(BOOM, rid=rid, position=position, at=at)}, **setting(3, block_size=2)
    )
    submit(engine)
    check_the_rest(engine, run(engine), expected, failed, BOOM)


@pytest.mark.parametrize("at", MOMENTS)
def test_whoever_was_preempted_in_a_step_that_failed_is_computed_again(
    make_engine: MakeEngine, make_m1: Any, mode: str, at: Moment
) -> None:
    """Its blocks should have moved to the host in that step; nobody knows whether they did."""

    class FailsWhenSomebodyLeaves(GPUExecutor):
        left = 1

        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            if self.left and engine.stats().num_preemptions and scheduler_output.num_scheduled_tokens:
                self.left = 0
                if at == "after":
                    super().execute_model(scheduler_output)
                raise BOOM
            return super().execute_model(scheduler_output)

    engine = make_engine({"executor": FailsWhenSomebodyLeaves}, **setting(4, blocks=7, block_size=2, mode=mode))
    for n in range(4):
        engine.add_request([5 + n, 9], greedy(9), request_id=str(n))
    outputs = run(engine)
    reasons = Counter(output.finish_reason for output in outputs.values())
    assert reasons["error"] >= 1 and reasons["length"] >= 1
    alone = make_m1()
    for n in range(4):
        whole = alone.generate([5 + n, 9], greedy(9)).token_ids
        got = outputs[str(n)]
        assert got.token_ids == whole[: len(got.token_ids)]
        assert got.finish_reason == "error" or got.token_ids == whole


def test_a_forward_that_breaks_between_two_layers_leaves_nothing_behind(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    """Some of the step's keys are in the blocks already; whoever gets these blocks next must not see them."""
    engine = make_engine(**setting(3, blocks=9, block_size=2))
    submit(engine)
    engine.step()
    layers = runner_of(engine).model.layers
    last = layers[-1]

    def broken(*args: Any) -> Any:
        layers[-1] = last
        raise BOOM

    layers[-1] = broken
    try:
        outputs = engine.step()
    finally:
        layers[-1] = last
    check_step(engine)
    assert {rid: o.finish_reason for rid, o in outputs.items()} == dict.fromkeys("abc", "error")
    assert engine.stats().num_free_blocks == 9
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

    engine = make_engine({"sampler": FailingSampler}, **setting(3))
    submit(engine)
    check_the_rest(engine, run(engine), expected, {"a": 1, "b": 1, "c": 1}, BOOM)


@pytest.mark.parametrize("move", ["copy_blocks", "swap_out", "swap_in"])
def test_a_move_of_blocks_that_breaks_fails_its_step_and_no_more(
    make_engine: MakeEngine, make_m1: Any, move: str
) -> None:
    engine = make_engine(**setting(4, blocks=8, block_size=2, mode="swap"))
    kv = runner_of(engine).kv
    real = getattr(kv, move)

    def broken(pairs: Any) -> None:
        if pairs:
            setattr(kv, move, real)
            raise BOOM
        real(pairs)

    setattr(kv, move, broken)
    params = greedy(8, n=2, temperature=1.0, seed=4)
    for n in range(3):
        engine.add_request([5 + n, 7, 8, 9], params, request_id=str(n))
    outputs = run(engine)
    assert getattr(kv, move) == real, "it was needed"
    alone, ends = make_m1(), Counter[str]()
    for n in range(3):
        for index, completion in enumerate(outputs[str(n)].outputs):
            ends[completion.finish_reason] += 1
            whole = alone.generate([5 + n, 7, 8, 9], greedy(8, temperature=1.0, seed=4 + index)).token_ids
            assert completion.token_ids == whole[: len(completion.token_ids)]
            assert completion.finish_reason == "error" or completion.token_ids == whole
    assert ends["length"] > 0 and ends.keys() <= {"length", "error"}


def test_an_abort_in_the_step_that_fails_stays_an_abort(make_engine: MakeEngine) -> None:
    class AbortingExecutor(GPUExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            if "b" in scheduler_output.num_scheduled_tokens:
                engine.abort_request("b")
                raise BOOM
            return super().execute_model(scheduler_output)

    engine = make_engine({"executor": AbortingExecutor}, **setting(3))
    submit(engine)
    ends = {rid: (output.finish_reason, output.error) for rid, output in run(engine).items()}
    assert ends["b"] == ("abort", None) and ends["a"] == ends["c"] == ("error", BOOM)
    assert ends["d"] == ends["e"] == ("length", None)


def test_every_way_to_ask_reports_the_error_in_the_output(make_engine: MakeEngine) -> None:
    def engine() -> LLMEngine:
        return make_engine({"model_runner": failing_runner(BOOM, rid="req-0", position=4)}, **setting(2))

    prompt = [5, 6, 7]
    assert engine().generate(prompt, greedy(6)).error is BOOM
    outputs = list(engine().generate_batch([prompt] * 3, greedy(6)).values())
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    streamed = list(engine().stream(prompt, greedy(6)))
    assert [output.finish_reason for output in streamed] == [None, None, "error"]


# --- what fails one request -------------------------------------------------------------------------------------------


class CheckingExecutor(GPUExecutor):
    """Looks at every result: each scheduled request has a token or an error, and none has both."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute_model(scheduler_output)
        assert len(output.req_ids) == len(output.sampled_token_ids) == len(output.logprobs)
        got, failed = set(output.req_ids), output.errors.keys()
        assert got.isdisjoint(failed - of_the_prompt(output)) and got | failed == set(
            scheduler_output.num_scheduled_tokens
        )
        return output


def of_the_prompt(output: ModelRunnerOutput) -> set[str]:
    """Those whose token is sound, but not what was asked of their prompt."""
    return {rid for rid, error in output.errors.items() if "for the prompt" in str(error)}


@torch.inference_mode()
def spoil_block(engine: LLMEngine, rid: str, value: float) -> None:
    """Put a number that is none into the first key of a request."""
    block_id = engine.engine_core.scheduler.kv_manager.block_ids(rid)[0]
    runner_of(engine).kv.layer(0).key_cache[block_id, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "drawn"])
def test_kv_that_is_no_number_fails_its_request_alone(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    value: float,
    params: dict[str, Any],
) -> None:
    """And whoever gets its blocks afterwards writes every slot before reading it."""
    engine = make_engine({"executor": CheckingExecutor}, **setting(3, blocks=10, block_size=2))
    submit(engine, b=greedy(NUM_TOKENS["b"], **params))
    last = engine.step()
    spoil_block(engine, "b", value)
    last |= run(engine)
    assert isinstance(last["b"].error, ForwardError)
    assert str(last["b"].error) == "the model computed NaN or infinite logits for request 'b'"
    assert len(last["b"].token_ids) == 1
    expected["b"] = last["b"].token_ids
    check_the_rest(engine, last, expected, {"b": 1}, ForwardError)


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 1}], ids=["plain", "prompt logprobs"])
def test_a_prompt_that_makes_no_numbers_fails_alone_and_cannot_spoil_its_blocks(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], asked: dict[str, Any]
) -> None:
    """The weights hold NaN for one token."""
    poison = 3000
    engine = make_engine(**setting(3, blocks=9, block_size=2))
    weight = runner_of(engine).model.embedding
    before = weight[poison].clone()
    with torch.no_grad():
        weight[poison] = torch.nan
    try:
        for rid, prompt in PROMPTS.items():
            prompt = [prompt[0], poison, *prompt[1:]] if rid in ("a", "d") else prompt
            engine.add_request(prompt, greedy(NUM_TOKENS[rid], **asked), request_id=rid)
        last = run(engine)
        check_the_rest(engine, last, expected, {"a": 0, "d": 0}, ForwardError)
    finally:
        with torch.no_grad():
            weight[poison] = before


def test_prompt_logprobs_that_are_no_numbers_fail_their_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if those of the next token are: nothing half right is reported."""
    engine = make_engine({"executor": CheckingExecutor}, **setting(3))
    model = runner_of(engine).model
    compute = model.compute_logits
    submit(engine, b=greedy(NUM_TOKENS["b"], prompt_logprobs=1))

    def spoiled(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        if len(hidden) == len(PROMPTS["b"]) - 1:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", spoiled)
    last = run(engine)
    assert "for the prompt" in str(last["b"].error)
    check_the_rest(engine, last, expected, {"b": 0}, ForwardError)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_settings_that_leave_no_token_fail_their_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], temperature: float
) -> None:
    engine = make_engine({"executor": CheckingExecutor}, **setting(3))
    vocab_size = engine.engine_core.input_processor.vocab_size
    impossible = greedy(5, min_tokens=3, stop_token_ids=list(range(vocab_size)), temperature=temperature)
    submit(engine, b=impossible, d=impossible)
    last = run(engine)
    assert "no token can be sampled for 'b'" in str(last["b"].error)
    check_the_rest(engine, last, expected, {"b": 0, "d": 0}, ForwardError)


def test_a_tokenizer_that_fails_while_tokens_are_committed_fails_its_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class FailsToName(IncrementalDetokenizer):
        def token_text(self, token_id: int) -> str:
            raise BOOM

    engine = make_engine({"detokenizer": FailsToName}, **setting(3))
    submit(engine, b=greedy(3, logprobs=1), d=greedy(3, logprobs=1))
    check_the_rest(engine, run(engine), expected, {"b": 0, "d": 0}, BOOM)


def test_a_tokenizer_that_fails_to_make_text_fails_its_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    bad = expected["b"][1]

    class CannotRead(IncrementalDetokenizer):
        def push(self, token_id: int) -> str:
            if token_id == bad:
                raise BOOM
            return super().push(token_id)

    engine = make_engine({"detokenizer": CannotRead}, **setting(3))
    submit(engine)
    last = run(engine)
    assert last["b"].error is BOOM and last["b"].finish_reason == "error"
    assert {rid: o.finish_reason for rid, o in last.items() if rid != "b"} == dict.fromkeys("acde", "length")


def test_an_output_that_cannot_be_made_fails_its_request_alone(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    class Refuses(OutputProcessor):
        def make_output(self, request: Request) -> RequestOutput:
            if request.request_id == "b" and request.sequence.get_output_len() == 2:
                raise BOOM
            return super().make_output(request)

    engine = make_engine({"output_processor": Refuses}, **setting(3))
    submit(engine)
    check_the_rest(engine, run(engine), expected, {"b": 2}, BOOM)


# --- one child of several ---------------------------------------------------------------------------------------------


def test_a_child_that_fails_ends_alone_and_its_parent_reports_it(make_engine: MakeEngine, make_m1: Any) -> None:
    """The blocks of the prompt are shared, so only a block of its own can be spoiled."""
    engine = make_engine(**setting(4, block_size=2))
    engine.add_request([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    for _ in range(4):
        engine.step()
    with torch.inference_mode():
        block_id = engine.engine_core.scheduler.kv_manager.block_ids("p/1")[-1]
        runner_of(engine).kv.layer(0).key_cache[block_id, 0] = torch.nan
    output = run(engine)["p"]
    alone = make_m1()
    whole = [alone.generate([5, 6, 7], greedy(6, temperature=1.0, seed=5 + i)).token_ids for i in range(3)]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    assert output.outputs[0].token_ids == whole[0] and output.outputs[2].token_ids == whole[2]
    assert output.outputs[1].token_ids == whole[1][: len(output.outputs[1].token_ids)]
    assert isinstance(output.error, ForwardError) and "'p/1'" in str(output.error)


def test_a_family_whose_step_fails_reports_what_each_had(make_engine: MakeEngine, make_m1: Any) -> None:
    engine = make_engine({"model_runner": failing_runner(BOOM, rid="p/1", position=4)}, **setting(4, block_size=2))
    output = engine.generate([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert output.error is BOOM
    assert [len(completion.token_ids) for completion in output.outputs] == [3, 2, 2]
    check_drained(engine)


def test_a_parent_whose_output_cannot_be_made_ends_with_the_error_and_all_its_children(
    make_engine: MakeEngine,
) -> None:
    class Refuses(OutputProcessor):
        def completion(self, request: Request, *, index: int = 0) -> Any:
            if request.request_id == "p/1" and request.sequence.get_output_len() == 2:
                raise BOOM
            return super().completion(request, index=index)

    engine = make_engine({"output_processor": Refuses}, **setting(4))
    engine.add_request([5, 6, 7], greedy(6, n=3), request_id="p")
    engine.add_request([5, 6], greedy(6), request_id="other")
    outputs = run(engine)
    assert outputs["p"].error is BOOM and outputs["p"].finish_reason == "error"
    assert outputs["other"].finish_reason == "length"
    assert engine.stats().num_finished == {"error": 1, "length": 1}


def test_parents_need_an_output_processor_that_knows_them() -> None:
    assert OutputProcessor.completions is not SingleRequestOutputProcessor.completions
    assert issubclass(ParentRequest, Request)


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [EngineDeadError("the device is gone"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["runner", "torch"],
)
def test_a_lost_device_fails_every_request_and_then_every_call(make_engine: MakeEngine, error: Exception) -> None:
    engine = make_engine({"model_runner": failing_runner(error, rid="a", position=3)}, **setting(2))
    submit(engine)
    engine.add_request([5], greedy(9, n=2), request_id="p")
    stream = engine.stream([5], greedy(9))
    engine.step()
    outputs = engine.step()
    assert outputs.keys() == PROMPTS.keys() | {"p"}
    streamed = list(stream)
    assert len(streamed) == 1
    for output in [*outputs.values(), *streamed]:
        assert output.finish_reason == "error" and isinstance(output.error, EngineDeadError)
    assert {rid: len(output.token_ids) for rid, output in outputs.items()} == {
        **{"a": 1, "b": 1, "c": 0, "d": 0, "e": 0},
        "p": 0,
    }
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
    assert engine.stats().num_finished == {"error": 7}
    engine.close()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize(("rid", "position"), [("a", 0), ("b", 6), ("d", 0), ("e", 5)])
def test_an_interrupted_step_can_be_repeated(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    rid: str,
    position: int,
    at: Moment,
) -> None:
    runner = failing_runner(KeyboardInterrupt(), rid=rid, position=position, at=at)
    engine = make_engine({"model_runner": runner}, **setting(3, block_size=2))
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


# --- the end ----------------------------------------------------------------------------------------------------------


def storages(engine: LLMEngine) -> list[Any]:
    """Weak references to the memory of the KV and of the largest weights."""
    runner = runner_of(engine)
    tensors = [runner.kv.layer(0).key_cache, runner.model.embedding]
    held = [runner.kv, runner.model, *(tensor.untyped_storage() for tensor in tensors)]
    return [weakref.ref(each) for each in held]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("state", ["idle", "in the middle", "after a failure"])
def test_a_closed_engine_holds_neither_kv_nor_weights(tiny_directory: Path, backend: Any, state: str) -> None:
    parts = {"model_runner": failing_runner(BOOM, rid="a", position=0)} if state == "after a failure" else {}
    config = ModelConfig(model=tiny_directory, device="cpu", dtype="float32", attention_backend=backend)
    engine = LLMEngine(model_config=config, parts=parts, **setting(3, blocks=30))
    submit(engine)
    outputs = [engine.step() for _ in range(3)]
    if state == "idle":
        run(engine)
    assert any(output.error is BOOM for output in outputs[0].values()) == (state == "after a failure")
    references, before = storages(engine), engine.stats()
    engine.close()
    outputs.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_output_tokens) == (before.num_steps, before.num_output_tokens)
    assert (stats.kv_tokens, stats.num_free_blocks) == (0, 30)
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    engine.close()
    for call in (
        lambda: engine.generate("a", greedy(1)),
        lambda: engine.stream("a", greedy(1)),
        lambda: engine.add_request("a", greedy(1)),
        lambda: engine.generate_batch(["a"], greedy(1)),
        lambda: engine.step(),
        lambda: engine.chat_prompt([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(EngineClosedError):
            call()


def test_an_interrupted_close_can_be_repeated(make_engine: MakeEngine) -> None:
    class Interrupted(GPUExecutor):
        left = 1

        def shutdown(self) -> None:
            super().shutdown()
            if self.left:
                self.left = 0
                raise KeyboardInterrupt

    engine = make_engine({"executor": Interrupted}, **setting(3))
    submit(engine)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()
