"""When something breaks: the requests of that step fail with it, or only the one that caused it; nothing is leaked.

A forward, a sampler or a preparation that raises ends all requests of its step, because any of them may be the cause.
Logits that are NaN or infinite belong to one row, and fail one request. Waiting requests run on.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m1_single_request import EngineClosedError, EngineDeadError, ForwardError, PartError, RequestOutput
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import Request
from tests.engine_contract.crowd import (
    NUM_TOKENS,
    PROMPTS,
    SEATS,
    Answers,
    MakeEngine,
    calls_of,
    check_the_rest,
    note,
    run,
    submit,
)
from tests.engine_contract.variants import (
    M3,
    M4_RADIX,
    M5_MIXED,
    M6,
    MOMENTS,
    WITH_M1,
    FailingRunner,
    Moment,
    Variant,
    calling,
    each_of,
    failing_part,
    runner_of,
)
from tests.support.engines import Recorder, greedy

pytestmark = pytest.mark.sample(3)

BOOM = RuntimeError("the forward broke")
MEMORY = "kv_tokens kv_bytes kv_bytes_reserved num_free_blocks available_size evictable_size protected_size".split()
"""Of the statistics: what is held, and what is free."""
each_paged = pytest.mark.parametrize("variant", [M3, M4_RADIX, M5_MIXED, M6], ids=str)
"""Those whose weights and KV are tensors of their own."""


variant = each_of(WITH_M1)
"""Every milestone, in each of its ways to run."""


# --- errors that end all requests of a step ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize(
    ("rid", "position"),
    [
        ("a", 0),
        ("b", 6),  # in the step that would end b
        ("d", 0),  # a prefill while others decode
        ("e", 4),  # others have ended before
    ],
)
def test_a_step_that_breaks_fails_those_who_share_it(
    variant: Variant, make_engine: MakeEngine, expected: Answers, rid: str, position: int, at: Moment
) -> None:
    failing = FailingRunner(variant, BOOM, rid=rid, position=position, at=at)
    engine = make_engine(failing.parts, seats=SEATS)
    submit(engine)
    last = run(variant, engine)
    assert rid in failing.hit and len(failing.hit) <= SEATS
    said = {rid: max(0, start - len(PROMPTS[rid]) + 1) for rid, start in failing.hit.items()}
    check_the_rest(variant, engine, last, expected, said, BOOM)


@pytest.mark.sample
def test_a_step_that_breaks_says_so_in_the_trace_and_shows_no_usage(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(FailingRunner(variant, BOOM, rid="a", position=0, at="forward").parts)
    recorder = Recorder(engine.tracer)
    engine.add_request(PROMPTS["a"], greedy(1), request_id="a")
    engine.step()
    (finish,) = recorder.events("finish")
    assert finish.reason == "error" and "RuntimeError" in finish.why
    assert not {"forward", "kv_usage", "blocks_used", "sampled"} & set(recorder.kinds())


def test_a_failed_forward_frees_its_tensors_while_the_caller_keeps_the_outputs(
    variant: Variant, make_engine: MakeEngine
) -> None:
    tensors: list[Any] = []

    def fail(part: Any, starts: Any) -> None:
        activations = torch.zeros(1000)
        tensors.append(weakref.ref(activations))
        raise BOOM

    engine = make_engine({"model_runner": calling(variant, "model_runner", fail)}, seats=SEATS)
    submit(engine)
    outputs = engine.step()
    assert all(output.error is BOOM for output in outputs.values()) and outputs
    assert tensors[0]() is None


def test_a_close_whose_reset_raises_frees_the_memory_all_the_same(variant: Variant, make_engine: MakeEngine) -> None:
    base, raises = variant.part("scheduler"), [True]

    def reset(part: Any, reason: Any) -> None:
        base.reset(part, reason)
        if raises.pop():
            raise BOOM

    engine = make_engine({"scheduler": type("FailsToReset", (base,), {"reset": reset})}, seats=SEATS)
    submit(engine)
    engine.step()
    runner = runner_of(engine)
    with pytest.raises(RuntimeError, match="the forward broke"):
        engine.close()
    assert not list(variant.owners(engine))
    assert variant.milestone < "m3" or not hasattr(runner, "kv")
    with pytest.raises(EngineClosedError):
        engine.step()


@pytest.mark.parametrize("role", ["model_runner", "executor"])
def test_an_abort_in_the_step_that_fails_stays_an_abort(variant: Variant, make_engine: MakeEngine, role: str) -> None:
    failed: set[str] = set()

    def abort_and_break(part: Any, starts: dict[str, int]) -> None:
        if "b" in starts:
            engine.abort_request("b")
            failed.update(starts.keys() - {"b"})
            raise BOOM

    role = role if role in variant.package.PARTS else "model_runner"
    engine = make_engine({role: calling(variant, role, abort_and_break)}, seats=SEATS)
    submit(engine)
    ends = {rid: (output.finish_reason, output.error) for rid, output in run(variant, engine).items()}
    assert ends.pop("b") == ("abort", None)
    assert ends == {rid: ("error", BOOM) if rid in failed else ("length", None) for rid in "acde"}


def test_every_way_to_ask_reports_the_error_in_the_output(variant: Variant, make_engine: MakeEngine) -> None:
    def engine() -> Any:
        return make_engine(FailingRunner(variant, BOOM, rid="req-0", position=4).parts, seats=2)

    prompts = [[5, 6, 7], [15, 16, 17], [25, 26, 27]]
    assert engine().generate(prompts[0], greedy(6)).error is BOOM
    first, *_, last = engine().generate_batch(prompts, greedy(6)).values()
    assert (first.finish_reason, last.finish_reason) == ("error", "length")
    streamed = list(engine().stream(prompts[0], greedy(6)))
    assert [output.finish_reason for output in streamed] == [None, None, "error"]
    assert streamed[-1].error is BOOM


# --- errors that end one request --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "drawn"])
def test_kv_that_is_no_number_fails_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, value: float, params: dict[str, Any]
) -> None:
    """And a request that gets its memory afterwards does not read it."""
    engine = make_engine(seats=SEATS, room=20)
    submit(engine, b=greedy(NUM_TOKENS["b"], **params))
    last: dict[str, Any] = {}
    while "b" not in last:
        note(last, engine.step())
    with torch.inference_mode():
        variant.first_key(engine, "b")[:] = value
    note(last, run(variant, engine))
    assert isinstance(last["b"].error, ForwardError)
    assert str(last["b"].error) == "the model computed NaN or infinite logits for request 'b'"
    assert len(last["b"].token_ids) == 1
    expected["b"] = last["b"].token_ids
    check_the_rest(variant, engine, last, expected, {"b": 1}, ForwardError)


@pytest.mark.parametrize("asked", [{}, {"prompt_logprobs": 1}], ids=["plain", "prompt logprobs"])
def test_a_prompt_that_makes_no_numbers_fails_alone_and_cannot_spoil_its_memory(
    variant: Variant, make_engine: MakeEngine, expected: Answers, asked: dict[str, Any]
) -> None:
    """The weights hold NaN for one token. Where prompts are padded, it stands behind their end as well."""
    poison = 3000
    engine = make_engine(seats=SEATS, room=20)
    weight = variant.embedding(runner_of(engine))
    before = weight[poison].clone()
    with torch.no_grad():
        weight[poison] = torch.nan
    try:
        for rid, prompt in PROMPTS.items():
            prompt = [prompt[0], poison, *prompt[1:]] if rid in ("a", "d") else prompt
            engine.add_request(prompt, greedy(NUM_TOKENS[rid], **asked), request_id=rid)
        last = run(variant, engine)
        check_the_rest(variant, engine, last, expected, {"a": 0, "d": 0}, ForwardError)
    finally:
        with torch.no_grad():
            weight[poison] = before


@pytest.mark.parametrize("variant", [M3, M4_RADIX, M5_MIXED], ids=str)  # guesses have as many rows
def test_prompt_logprobs_that_are_no_numbers_fail_their_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if those of the next token are: nothing half right is reported."""
    engine = make_engine(seats=SEATS)
    model = runner_of(engine).model
    compute = model.compute_logits

    def spoiled(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        if len(hidden) == len(PROMPTS["b"]) - 1:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", spoiled)
    submit(engine, b=greedy(NUM_TOKENS["b"], prompt_logprobs=1))
    last = run(variant, engine)
    assert "for the prompt" in str(last["b"].error)
    check_the_rest(variant, engine, last, expected, {"b": 0}, ForwardError)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_settings_that_leave_no_token_fail_their_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, temperature: float
) -> None:
    engine = make_engine(seats=SEATS)
    vocab_size = len(variant.embedding(runner_of(engine)))
    impossible = greedy(5, min_tokens=3, stop_token_ids=list(range(vocab_size)), temperature=temperature)
    submit(engine, b=impossible, d=impossible)
    last = run(variant, engine)
    assert "no token can be sampled for 'b'" in str(last["b"].error)
    check_the_rest(variant, engine, last, expected, {"b": 0, "d": 0}, ForwardError)


def test_a_tokenizer_that_fails_while_tokens_are_committed_fails_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    class FailsToName(IncrementalDetokenizer):
        def token_text(self, token_id: int) -> str:
            raise BOOM

    engine = make_engine({"detokenizer": FailsToName}, seats=SEATS)
    submit(engine, b=greedy(3, logprobs=1), d=greedy(3, logprobs=1))
    check_the_rest(variant, engine, run(variant, engine), expected, {"b": 0, "d": 0}, BOOM)


def test_a_tokenizer_that_fails_to_make_text_fails_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    bad = expected["b"][1]

    class CannotRead(IncrementalDetokenizer):
        def push(self, token_id: int) -> None:
            if token_id == bad:
                raise BOOM
            super().push(token_id)

    engine = make_engine({"detokenizer": CannotRead}, seats=SEATS)
    submit(engine)
    last = run(variant, engine)
    assert last["b"].error is BOOM and last["b"].finish_reason == "error"
    assert {rid: o.finish_reason for rid, o in last.items() if rid != "b"} == dict.fromkeys("acde", "length")


@pytest.mark.parametrize("length", [2, 3], ids=["on its way", "at its end"])
def test_an_output_that_cannot_be_made_fails_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, length: int
) -> None:
    class Refuses(variant.part("output_processor")):  # type: ignore[misc]
        def make_output(self, request: Request) -> RequestOutput:
            if request.request_id == "b" and request.sequence.get_output_len() == length:
                raise BOOM
            return super().make_output(request)  # type: ignore[no-any-return]

    engine = make_engine({"output_processor": Refuses}, seats=SEATS)
    submit(engine)
    last = run(variant, engine)
    assert last["b"].text == ""
    check_the_rest(variant, engine, last, expected, {"b": length}, BOOM)


# --- errors that end all requests -------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_an_update_ends_all_requests_and_the_engine_goes_on(
    variant: Variant, make_engine: MakeEngine, expected: Answers, call: int
) -> None:
    """Each has one output, whether its children run, or wait for a sibling's prompt or for a seat."""
    n, error = 3 if variant.has_families else 1, RuntimeError("the update broke")
    failing = failing_part(variant, "scheduler", "update_from_output", error, call=call)
    engine = make_engine({"scheduler": failing}, seats=SEATS)
    asked = {"a": greedy(6, n=n), "d": greedy(6), "e": greedy(4, n=n)}
    for rid, params in asked.items():
        engine.add_request(PROMPTS[rid], params, request_id=rid)
    last = run(variant, engine)
    assert last.keys() == asked.keys() and engine.stats().num_finished == {"error": 3}
    assert engine.stats().num_steps == call
    for rid, output in last.items():
        assert isinstance(output.error, PartError) and output.error.__cause__ is error
        assert "the part 'scheduler' (Failing), in line " in str(output.error)
        assert str(output.error).endswith(" of variants.py, failed: RuntimeError('the update broke')")
        assert len(output.outputs) == asked[rid].n
        for completion in output.outputs:
            assert completion.finish_reason == "error"
            assert completion.token_ids == expected[rid][: len(completion.token_ids)]
    assert last["a"].token_ids, "the first one ran"
    for rid, params in asked.items():
        again = engine.generate(PROMPTS[rid], params, request_id=rid)
        assert [completion.token_ids for completion in again.outputs] == [expected[rid]] * params.n


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [EngineDeadError("the device is gone"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["runner", "torch"],
)
def test_a_lost_device_fails_every_request_and_then_every_call(
    variant: Variant, make_engine: MakeEngine, error: Exception
) -> None:
    engine = make_engine(FailingRunner(variant, error, rid="a", position=3).parts, seats=2)
    submit(engine)
    stream = engine.stream([5], greedy(9))
    running = engine.step().keys()
    outputs = engine.step()
    assert outputs.keys() == PROMPTS.keys()
    streamed = list(stream)
    assert len(streamed) == 1
    for output in [*outputs.values(), *streamed]:
        assert output.finish_reason == "error" and isinstance(output.error, EngineDeadError)
    assert {rid for rid, output in outputs.items() if output.token_ids} == running
    variant.check_drained(engine)
    for call in calls_of(engine):
        with pytest.raises(EngineDeadError):
            call()
    assert engine.stats().num_finished == {"error": 6}
    engine.close()


# --- the end ----------------------------------------------------------------------------------------------------------


def storages(engine: Any) -> list[Any]:
    """Weak references to the memory of the KV and of the largest weights."""
    runner = runner_of(engine)
    tensors = [runner.kv.layer(0).key_cache, runner.model.embedding]
    held = [runner.kv, runner.model, *(tensor.untyped_storage() for tensor in tensors)]
    return [weakref.ref(each) for each in held]


@pytest.mark.sample
@each_paged
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("state", ["idle", "in the middle", "after a failure"])
def test_a_closed_engine_holds_neither_kv_nor_weights(
    variant: Variant, tiny_directory: Path, backend: str, state: str
) -> None:
    parts = FailingRunner(variant, BOOM, rid="a", position=0).parts if state == "after a failure" else {}
    package, limits = variant.package, variant.limits(SEATS, None, 120)
    config = package.ModelConfig(model=tiny_directory, device="cpu", dtype="float32", attention_backend=backend)
    engine = package.LLMEngine(model_config=config, parts={**variant.parts(), **parts}, **limits)
    fresh = engine.stats()
    submit(engine)
    outputs = [engine.step() for _ in range(3)]
    if state == "idle":
        run(variant, engine)
    assert any(output.error is BOOM for output in outputs[0].values()) == (state == "after a failure")
    references, before = storages(engine), engine.stats()
    engine.close()
    gc.collect()
    assert outputs and [reference() for reference in references] == [None] * len(references)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_output_tokens) == (before.num_steps, before.num_output_tokens)
    for name in MEMORY:
        assert getattr(stats, name, None) == getattr(fresh, name, None), name
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    engine.close()
    others = [engine.flush_cache] if hasattr(engine, "flush_cache") else []
    for call in [*calls_of(engine), lambda: engine.chat_prompt([{"role": "user", "content": "a"}]), *others]:
        with pytest.raises(EngineClosedError):
            call()
