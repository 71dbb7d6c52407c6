"""When something breaks while KV is shared, or while requests lose their places.

A step is either prompts or decodes, so whoever waits for it is not concerned. What a failed step wrote is shared with
nobody; what was shared before stays. All that every milestone promises about failures: `tests/engine_contract`.
"""

from typing import Any

import pytest
import torch

from m4_radix_cache import EngineDeadError, ForwardError, LLMEngine, sampling_batch_info
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from tests.engine_contract.variants import M4_RADIX, MOMENTS, FailingRunner, Moment
from tests.m4_radix_cache.engines import MakeEngine, check_flushed, greedy, run, runner_of, scheduler_of, setting
from tests.support.victims import check_some_failed, failing_when_somebody_leaves

BOOM = RuntimeError("the forward broke")


# --- what takes the whole step along ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", MOMENTS)
def test_what_a_request_computed_before_its_decode_failed_is_not_shared(make_engine: MakeEngine, at: Moment) -> None:
    """Its prompt of 12 tokens was shared when it was complete; the pages that its answer filled are freed."""
    engine = make_engine(FailingRunner(M4_RADIX, BOOM, rid="fails", position=21, at=at).parts, **setting(3))
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
    failing = failing_when_somebody_leaves(lambda: engine.stats().num_retractions, BOOM, at)
    limits = setting(4, tokens=28, page_size=2, cache=cache, conservativeness=0)
    engine = make_engine({"executor": failing}, **limits)
    for n in range(4):
        engine.add_request([5 + n, 9], greedy(9), request_id=str(n))
        engine.step()
    outputs = run(engine)
    assert engine.stats().num_retractions
    check_some_failed(outputs, make_m1())


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
