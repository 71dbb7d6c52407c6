"""The known ways in which an engine with a prefix cache goes wrong, one test each.

Most of them show nowhere but in a wrong token, much later, or in memory that is short for ever. So each test compares
with m1, looks at the memory after every step, and says how many tokens may be computed.
"""

from typing import Any

import pytest

from m4_radix_cache import ForwardError, SamplingParams
from tests.engine_contract.variants import M4_RADIX, MOMENTS, FailingRunner, Moment
from tests.equivalence.traffic import prompt_of
from tests.m4_radix_cache.engines import (
    MakeEngine,
    Recorder,
    cached_len,
    check_answers,
    check_drained,
    greedy,
    no_numbers_for,
    run,
    setting,
    submit,
)

SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])
# --- a prompt that is cached whole ------------------------------------------------------------------------------------


def test_whoever_only_looks_splits_nothing_that_nobody_parts_from(make_engine: MakeEngine) -> None:
    """The beginning of a cached prompt, in whole pages. The policy may look no further than the request may go."""
    engine = make_engine(**setting(page_size=4))
    engine.generate(prompt_of(16), greedy(1))
    recorder = Recorder(engine.tracer)
    assert engine.generate(prompt_of(16)[:12], greedy(1)).metrics.cached_tokens == 8
    assert [(event.head, event.tail) for event in recorder.events("split")] == [(8, 8), (4, 4)]  # the other: its insert


# --- eviction ---------------------------------------------------------------------------------------------------------


@SHARING
def test_what_a_request_has_just_found_is_not_evicted_for_its_own_rest(
    make_engine: MakeEngine, m1: Any, cache: str
) -> None:
    """8 pages: 3 of a first prompt, 3 of a second, 2 free. The third finds the first ones, and needs 3 more."""
    oldest_first = {"eviction_policy": "fifo"} if cache == "radix" else {}
    engine = make_engine(**setting(tokens=32, cache=cache, **oldest_first))
    first, second = prompt_of(12), prompt_of(12, 1)
    for prompt in (first, second):
        engine.generate(prompt, greedy(1))
    assert engine.stats().evictable_size == 24
    prompt, params = [*first, *prompt_of(9, 2)], greedy(3)
    engine.add_request(prompt, params, request_id="p")
    outputs = run(engine)
    assert outputs["p"].metrics.cached_tokens == 12 and engine.stats().num_evicted_tokens >= 4
    check_answers(outputs, m1, {"p": (prompt, params)})
    assert cached_len(engine, first) == 12, "it was in use"


# --- what a request leaves behind -------------------------------------------------------------------------------------


@SHARING
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("end", ["length", "stop string", "stop id", "eos"])
def test_the_cache_keeps_prompt_and_output_and_nothing_after_a_stop(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int, end: str
) -> None:
    prompt = prompt_of(10)
    free = m1.generate(prompt, greedy(20))
    sixth = free.token_ids[5]
    assert sixth not in free.token_ids[:5]
    params = {
        "length": greedy(6),
        "stop string": greedy(20, stop=m1.generate(prompt, greedy(6)).text[-2:]),
        "stop id": greedy(20, stop_token_ids=(sixth,)),
        "eos": SamplingParams(max_tokens=20),
    }[end]
    engine = make_engine(eos_token_ids=[sixth], **setting(page_size=page_size, cache=cache))
    output = engine.generate(prompt, params)
    assert (output.finish_reason == "length") == (end == "length")
    assert output.token_ids == free.token_ids[:6], "the token that stops it is the last"
    kept = (len(prompt) + 6 - 1) // page_size * page_size
    assert engine.stats().evictable_size == kept
    assert cached_len(engine, [*prompt, *free.token_ids]) == kept
    check_drained(engine)


@pytest.mark.parametrize("moment", MOMENTS)
@SHARING
def test_a_prompt_whose_forward_failed_leaves_nothing_in_the_cache(
    make_engine: MakeEngine, m1: Any, cache: str, moment: Moment
) -> None:
    failing = FailingRunner(M4_RADIX, RuntimeError("broken"), rid="p", position=8, at=moment)
    engine = make_engine(failing.parts, **setting(page_size=4, cache=cache))
    first, params = prompt_of(8), greedy(5)
    engine.generate([*first, 1], greedy(1))
    prompt = [*first, *prompt_of(9, 1)]
    engine.add_request(prompt, params, request_id="p")
    outputs = run(engine)
    assert outputs["p"].finish_reason == "error" and outputs["p"].token_ids == ()
    assert engine.stats().evictable_size == cached_len(engine, prompt) == 8, "what others had computed"
    again = engine.generate(prompt, params)
    assert again.metrics.cached_tokens == 8 and again.token_ids == m1.generate(prompt, params).token_ids


@SHARING
def test_a_prompt_with_logits_that_are_no_numbers_leaves_nothing_in_the_cache(
    make_engine: MakeEngine, m1: Any, cache: str
) -> None:
    engine = make_engine({"model_runner": no_numbers_for(-1, 1)}, **setting(page_size=4, cache=cache, policy="fcfs"))
    asked = {"good": (prompt_of(9), greedy(5)), "bad": (prompt_of(11, 1), greedy(5))}
    submit(engine, asked)
    outputs = run(engine)
    assert isinstance(outputs["bad"].error, ForwardError)
    assert cached_len(engine, prompt_of(11, 1)) == 0 and cached_len(engine, prompt_of(9)) == 8
    check_answers(outputs, m1, {"good": asked["good"]})
    again = engine.generate(*asked["bad"])
    assert again.metrics.cached_tokens == 0 and again.token_ids == m1.generate(*asked["bad"]).token_ids
