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
    sampling_batch_info,
)
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from tests.engine_contract.crowd import NUM_TOKENS, PROMPTS, answers_of, calls_of, submit
from tests.m4_radix_cache.engines import (
    MakeEngine,
    Moment,
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


# --- what takes the whole step along ----------------------------------------------------------------------------------


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


# --- what fails one request -------------------------------------------------------------------------------------------


@torch.inference_mode()
def spoil(engine: LLMEngine, rid: str, place: int, value: float) -> None:
    """Put a number that is none into the key of one of a request's tokens; pages are of 2."""
    scheduler = scheduler_of(engine)
    row = scheduler.requests[rid].req_pool_idx
    assert row is not None
    slot = int(scheduler.pools.req_to_token_pool.read(row, place, place + 1)[0])
    runner_of(engine).kv.layer(0).key_cache[slot // 2, slot % 2] = value


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


def test_prompt_logprobs_that_are_no_numbers_fail_their_request_alone(
    make_engine: MakeEngine, make_m1: Any, monkeypatch: pytest.MonkeyPatch
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
    last, expected = run(engine), answers_of(make_m1)
    assert "for the prompt" in str(last["b"].error)
    assert {rid: output.token_ids for rid, output in last.items()} == expected | {"b": ()}
    check_flushed(engine)


# --- a device that fails while the scheduler makes tensors ------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: an illegal memory access", 700)],
    ids=["memory", "device"],
)
@pytest.mark.parametrize(
    ("place", "verb"),
    [
        (sampling_batch_info, "seen_by"),
        *((SamplingBatchInfo, verb) for verb in ("merge_batch", "filter_batch", "advance")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_device_that_fails_in_the_books_ends_all_requests(
    make_engine: MakeEngine, make_m1: Any, monkeypatch: pytest.MonkeyPatch, place: Any, verb: str, error: Exception
) -> None:
    left, real = list[Exception](), getattr(place, verb)

    def fails(*args: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args)

    monkeypatch.setattr(place, verb, fails)
    engine = make_engine(**setting(2, policy="fcfs"))
    engine.add_request([5, 6, 7], greedy(3), request_id="a")
    engine.step()
    left.append(error)
    engine.add_request([8, 9], greedy(6, repetition_penalty=1.2), request_id="b")
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
    runner, before = runner_of(engine), engine.stats()
    tensors = [runner.kv.layer(0).key_cache, runner.model.embedding]
    held = [runner.kv, runner.model, *(tensor.untyped_storage() for tensor in tensors)]
    references: list[Any] = [weakref.ref(one) for one in held]
    del runner, tensors, held
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
