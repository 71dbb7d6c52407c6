"""When something breaks while KV is shared, while requests lose their places, or at the end of an engine.

A step is either prompts or decodes, so whoever waits for it is not concerned. What a failed step wrote is shared with
nobody; what was shared before stays. All that every milestone promises about failures: `tests/engine_contract`.
"""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache import (
    EngineClosedError,
    EngineDeadError,
    ForwardError,
    LLMEngine,
    ModelConfig,
    PartError,
    sampling_batch_info,
)
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from tests.engine_contract.crowd import NUM_TOKENS, PROMPTS, Answers, answers_of, calls_of, submit
from tests.m4_radix_cache.engines import (
    MakeEngine,
    Moment,
    cached_len,
    check_drained,
    check_flushed,
    failing_runner,
    greedy,
    run,
    runner_of,
    scheduler_of,
    setting,
)

BOOM = RuntimeError("the forward broke")
MOMENTS: tuple[Moment, ...] = ("before", "forward", "after")


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """What everybody gets if nothing breaks."""
    return answers_of(make_m1)


def check_the_rest(engine: LLMEngine, last: dict[str, Any], expected: Answers, failed: dict[str, int]) -> None:
    """Those who `failed` have so many tokens, the others all of theirs, and a request that comes now as well."""
    for rid, output in last.items():
        if rid in failed:
            assert output.finish_reason == "error" and output.token_ids == expected[rid][: failed[rid]], rid
        else:
            assert output.finish_reason == "length" and output.token_ids == expected[rid], rid
    assert last.keys() == PROMPTS.keys()
    assert engine.stats().num_finished == Counter(output.finish_reason for output in last.values())
    for rid in "ade":
        assert engine.generate(PROMPTS[rid], greedy(NUM_TOKENS[rid])).token_ids == expected[rid], f"{rid}, again"
    check_drained(engine)
    check_flushed(engine)


# --- what takes the whole step along ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MOMENTS)
def test_what_a_failed_prefill_wrote_is_shared_with_nobody(make_engine: MakeEngine, make_m1: Any, at: Moment) -> None:
    """Who asks the same prompt next starts from what was there before, and computes the rest."""
    engine = make_engine({"model_runner": failing_runner(BOOM, rid="fails", position=4, at=at)}, **setting(3))
    prompt = [*range(5, 17)]
    engine.generate(prompt[:4], greedy(2))
    assert engine.generate(prompt, greedy(4), request_id="fails").error is BOOM
    assert cached_len(engine, prompt) == 4
    output = engine.generate(prompt, greedy(4))
    assert output.token_ids == make_m1().generate(prompt, greedy(4)).token_ids
    assert output.metrics.cached_tokens == 4


def test_what_a_request_shared_before_its_decode_failed_stays(make_engine: MakeEngine) -> None:
    engine = make_engine({"model_runner": failing_runner(BOOM, rid="fails", position=14)}, **setting(3))
    prompt = [*range(5, 17)]
    assert engine.generate(prompt, greedy(9), request_id="fails").error is BOOM
    assert cached_len(engine, prompt) == 12, "its prompt; what it said is not kept"
    check_drained(engine)


@pytest.mark.parametrize("at", MOMENTS)
def test_what_a_request_computed_before_its_decode_failed_is_not_shared(make_engine: MakeEngine, at: Moment) -> None:
    """Its prompt of 12 tokens was shared when it was complete; the pages that its answer filled are freed."""
    engine = make_engine({"model_runner": failing_runner(BOOM, rid="fails", position=21, at=at)}, **setting(3))
    prompt = [*range(5, 17)]
    failed = engine.generate(prompt, greedy(20), request_id="fails")
    assert failed.error is BOOM and len(failed.token_ids) == 10
    assert engine.stats().evictable_size == 12
    again = engine.generate([*prompt, *failed.token_ids, 3], greedy(2))
    assert again.metrics.cached_tokens == 12
    check_flushed(engine)


@pytest.mark.parametrize("at", ["before", "after"])
def test_whoever_was_retracted_in_a_step_that_failed_is_computed_again(
    make_engine: MakeEngine, make_m1: Any, cache: str, at: Moment
) -> None:
    class FailsWhenSomebodyLeaves(GPUExecutor):
        left = 1

        def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:  # type: ignore[override]
            if self.left and engine.stats().num_retractions:
                self.left = 0
                if at == "after":
                    super().execute_model(batch)  # type: ignore[arg-type]
                raise BOOM
            return super().execute_model(batch)  # type: ignore[arg-type]

    limits = setting(4, tokens=28, page_size=2, cache=cache, conservativeness=0)
    engine = make_engine({"executor": FailsWhenSomebodyLeaves}, **limits)
    for n in range(4):
        engine.add_request([5 + n, 9], greedy(9), request_id=str(n))
        engine.step()
    outputs = run(engine)
    assert engine.stats().num_retractions
    reasons = Counter(output.finish_reason for output in outputs.values())
    assert reasons["error"] >= 1 and reasons["length"] >= 1
    alone = make_m1()
    for n in range(4):
        whole, got = alone.generate([5 + n, 9], greedy(9)).token_ids, outputs[str(n)]
        assert got.token_ids == whole[: len(got.token_ids)]
        assert got.finish_reason == "error" or got.token_ids == whole


def test_siblings_of_a_failed_prefill_start_without_it(make_engine: MakeEngine, make_m1: Any) -> None:
    """The others wait for the first child's prompt. It fails; the second one computes it then."""
    engine = make_engine(
        {"model_runner": failing_runner(BOOM, rid="p/0", position=0, at="after")}, **setting(4, page_size=2)
    )
    output = engine.generate([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    alone = make_m1()
    whole = [alone.generate([5, 6, 7], greedy(6, temperature=1.0, seed=5 + i)).token_ids for i in range(3)]
    assert [completion.finish_reason for completion in output.outputs] == ["error", "length", "length"]
    assert [completion.token_ids for completion in output.outputs] == [(), *whole[1:]]
    assert output.error is BOOM
    check_drained(engine)


# --- what fails one request -------------------------------------------------------------------------------------------


@torch.inference_mode()
def spoil(engine: LLMEngine, rid: str, place: int, value: float) -> None:
    """Put a number that is none into the key of one of a request's tokens; pages are of 2."""
    scheduler = scheduler_of(engine)
    row = scheduler.requests[rid].req_pool_idx
    assert row is not None
    slot = int(scheduler.pools.req_to_token_pool.read(row, place, place + 1)[0])
    runner_of(engine).kv.layer(0).key_cache[slot // 2, slot % 2] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_kv_that_is_no_number_in_a_tail_fails_its_request_alone(
    make_engine: MakeEngine, expected: Answers, value: float
) -> None:
    """And whoever gets its pages afterwards writes every slot before reading it."""
    engine = make_engine(**setting(3, tokens=40, page_size=2))
    submit(engine)
    last = engine.step()
    spoil(engine, "b", 4, value)
    last |= run(engine)
    assert str(last["b"].error) == "the model computed NaN or infinite logits for request 'b'"
    check_the_rest(engine, last, expected, {"b": 1})


def test_kv_that_is_no_number_in_a_shared_page_fails_all_who_share_it_and_is_forgotten_by_a_flush(
    make_engine: MakeEngine, make_m1: Any
) -> None:
    engine = make_engine(**setting(3, page_size=2))
    prompt = [*range(5, 14)]
    engine.add_request(prompt, greedy(6), request_id="first")
    engine.step()
    engine.add_request(prompt, greedy(6), request_id="second")
    engine.add_request([99, 98], greedy(6), request_id="other")
    last = engine.step()
    spoil(engine, "first", 0, float("nan"))
    last |= run(engine)
    assert isinstance(last["first"].error, ForwardError) and isinstance(last["second"].error, ForwardError)
    assert last["other"].finish_reason == "length"
    assert engine.generate(prompt, greedy(6)).finish_reason == "error", "nobody knows that the cache is spoiled"
    check_flushed(engine)
    assert engine.generate(prompt, greedy(6)).token_ids == make_m1().generate(prompt, greedy(6)).token_ids


def test_a_prompt_that_makes_no_numbers_is_not_shared(make_engine: MakeEngine) -> None:
    """The weights hold NaN for one token."""
    engine = make_engine(**setting(3, page_size=2))
    weight = runner_of(engine).model.embedding
    before = weight[3000].clone()
    prompt = [5, 6, 3000, 7, 8]
    with torch.no_grad():
        weight[3000] = torch.nan
    try:
        assert isinstance(engine.generate(prompt, greedy(2)).error, ForwardError)
    finally:
        with torch.no_grad():
            weight[3000] = before
    assert cached_len(engine, prompt) == 0
    assert engine.generate(prompt, greedy(2)).finish_reason == "length"
    check_drained(engine)


def test_prompt_logprobs_that_are_no_numbers_fail_their_request_alone(
    make_engine: MakeEngine, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if those of the next token are: nothing half right is reported."""
    engine = make_engine(**setting(3, policy="fcfs"))
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
    check_the_rest(engine, last, expected, {"b": 0})


def test_a_child_that_fails_ends_alone_and_its_parent_reports_it(make_engine: MakeEngine, make_m1: Any) -> None:
    """The pages of the prompt are shared, so only a page of its own is spoiled."""
    engine = make_engine(**setting(4, page_size=2))
    engine.add_request([5, 6, 7], greedy(6, n=3, temperature=1.0, seed=5), request_id="p")
    for _ in range(4):
        engine.step()
    spoil(engine, "p/1", 3, float("nan"))
    output = run(engine)["p"]
    alone = make_m1()
    whole = [alone.generate([5, 6, 7], greedy(6, temperature=1.0, seed=5 + i)).token_ids for i in range(3)]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    assert output.outputs[0].token_ids == whole[0] and output.outputs[2].token_ids == whole[2]
    assert isinstance(output.error, ForwardError) and "'p/1'" in str(output.error)


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [EngineDeadError("the device is gone"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["runner", "torch"],
)
def test_a_lost_device_fails_every_request_and_then_every_call(
    make_engine: MakeEngine, cache: str, error: Exception
) -> None:
    runner = failing_runner(error, rid="a", position=3)
    engine = make_engine({"model_runner": runner}, **setting(2, cache=cache, policy="fcfs"))
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
    for call in calls_of(engine):
        with pytest.raises(EngineDeadError):
            call()
    assert engine.stats().num_finished == {"error": 7}
    engine.close()


# --- a device that fails while the scheduler makes tensors ------------------------------------------------------------


def test_no_memory_for_the_settings_of_a_prompt_ends_all_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, make_m1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sampling_batch_info.seen_by

    def seen_by(rows: Any, *others: Any) -> Any:
        if any(row.params.has_penalties for row in rows):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(rows, *others)

    monkeypatch.setattr(sampling_batch_info, "seen_by", seen_by)
    engine = make_engine(**setting(3, policy="fcfs"))
    engine.add_request([5, 6, 7], greedy(9), request_id="runs")
    engine.step(), engine.step()
    engine.add_request([8, 9], greedy(5, repetition_penalty=1.2), request_id="starts")
    outputs = run(engine)
    for rid in ("runs", "starts"):
        error = outputs[rid].error
        assert isinstance(error, PartError) and isinstance(error.__cause__, torch.OutOfMemoryError), rid
    assert engine.generate([5, 6, 7], greedy(9)).token_ids == make_m1().generate([5, 6, 7], greedy(9)).token_ids


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["memory", "device"],
)
@pytest.mark.parametrize("verb", ["merge_batch", "filter_batch", "advance"])
def test_a_device_that_fails_in_the_books_ends_all_requests(
    make_engine: MakeEngine, make_m1: Any, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception
) -> None:
    left, real = list[Exception](), getattr(SamplingBatchInfo, verb)

    def fails(self: Any, *args: Any) -> Any:
        if left:
            raise left.pop()
        return real(self, *args)

    monkeypatch.setattr(SamplingBatchInfo, verb, fails)
    engine = make_engine(**setting(2, policy="fcfs"))
    engine.add_request([5, 6, 7], greedy(3), request_id="a")
    engine.step()
    left.append(error)
    engine.add_request([8, 9], greedy(6), request_id="b")
    engine.add_request([10], greedy(6), request_id="waits")
    outputs = run(engine)
    assert not left and outputs.keys() == {"a", "b", "waits"}
    if isinstance(error, torch.AcceleratorError):
        assert isinstance(engine.engine_core.dead, EngineDeadError)
        assert all(isinstance(output.error, EngineDeadError) for output in outputs.values() if output.error)
        engine.close()
        return
    assert {output.error.__cause__ for output in outputs.values() if output.error is not None} == {error}
    assert outputs["waits"].error is not None
    assert engine.generate([10], greedy(6)).token_ids == make_m1().generate([10], greedy(6)).token_ids
    check_flushed(engine)


# --- the end ----------------------------------------------------------------------------------------------------------


def storages(engine: LLMEngine) -> list[Any]:
    """Weak references to the memory of the KV and of the largest weights."""
    runner = runner_of(engine)
    tensors = [runner.kv.layer(0).key_cache, runner.model.embedding]
    held = [runner.kv, runner.model, *(tensor.untyped_storage() for tensor in tensors)]
    return [weakref.ref(each) for each in held]


@pytest.mark.sample(1)
@pytest.mark.parametrize("state", ["idle", "in the middle", "after a failure"])
def test_a_closed_engine_holds_neither_kv_nor_weights(tiny_directory: Path, state: str) -> None:
    parts = {"model_runner": failing_runner(BOOM, rid="a", position=0)} if state == "after a failure" else {}
    config = ModelConfig(model=tiny_directory, device="cpu", dtype="float32")
    engine = LLMEngine(model_config=config, parts=parts, **setting(3, tokens=120))
    submit(engine)
    outputs = [engine.step() for _ in range(3)]
    if state == "idle":
        run(engine)
    references, before = storages(engine), engine.stats()
    engine.close()
    outputs.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_output_tokens) == (before.num_steps, before.num_output_tokens)
    assert (stats.kv_tokens, stats.available_size, stats.evictable_size, stats.protected_size) == (0, 120, 0, 0)
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    engine.close()
    for call in [*calls_of(engine), engine.flush_cache]:
        with pytest.raises(EngineClosedError):
            call()


def test_flushing_is_refused_while_anything_is_unfinished(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(**setting(1, cache=cache))
    submit(engine)
    before = engine.stats()
    assert not engine.flush_cache() and engine.stats() == before
    engine.step(), engine.step()
    assert not engine.flush_cache()
    run(engine)
    check_flushed(engine)
    check_flushed(engine)
