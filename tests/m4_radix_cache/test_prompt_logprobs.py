"""Log-probabilities of a prompt need the model's logits at every token of it, so nothing of it may come from the cache.

The reuse is limited to where they begin (S19), which is the first token here. What they are must not depend on what
was cached, on who shares the step, or on a retraction.
"""

from typing import Any

import pytest

from m4_radix_cache import SamplingParams
from tests.equivalence import answers
from tests.equivalence.answers import assert_same_logprobs
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.equivalence.traffic import prompt_of
from tests.m4_radix_cache.engines import MakeEngine, Recorder, cached_len, check_drained, greedy, run, setting
from tests.m4_radix_cache.logprobs import RATED, check_rated

SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])


@SHARING
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_cached_prompt_is_computed_again_for_its_logprobs(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    prompt, limits = prompt_of(21), setting(page_size=page_size, cache=cache)
    without = make_engine(**limits).generate(prompt, RATED)
    engine = make_engine(**limits)
    engine.generate(prompt, greedy(4))
    assert cached_len(engine, prompt) == 21 // page_size * page_size
    output = engine.generate(prompt, RATED)
    assert (output.metrics.cached_tokens, engine.stats().num_prompt_tokens) == (0, 42)
    check_rated(output, without)
    check_rated(output, m1.generate(prompt, RATED))
    assert engine.stats().evictable_size == 24 // page_size * page_size, "what was there stays, and is there once"
    assert engine.generate(prompt, greedy(4)).metrics.cached_tokens == 20 // page_size * page_size
    check_drained(engine)


@SHARING
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
def test_rated_prompts_run_beside_others_that_hit(make_engine: MakeEngine, m1: Any, cache: str, policy: str) -> None:
    engine = make_engine(**setting(8, cache=cache, policy=policy))
    recorder, prompt = Recorder(engine.tracer), prompt_of(41)
    engine.generate(prompt, greedy(1))
    asked = {"hits": greedy(4), "rated": RATED, "hits too": greedy(4, logprobs=2), "rated too": RATED}
    for rid, params in asked.items():
        engine.add_request(prompt, params, request_id=rid)
    outputs = run(engine)
    assert [outputs[rid].metrics.cached_tokens for rid in asked] == [40, 0, 40, 0]
    extends = [event for event in recorder.events("batch") if event.mode == "extend"][1:]
    assert len(extends) == 1, "nobody waits for what it may not use"
    for rid in ("rated", "rated too"):
        check_rated(outputs[rid], m1.generate(prompt, RATED))


@SHARING
def test_of_several_outputs_the_first_rates_the_prompt_and_the_others_hit(
    make_engine: MakeEngine, m1: Any, cache: str
) -> None:
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=11, prompt_logprobs=2)
    engine, prompt = make_engine(**setting(cache=cache)), prompt_of(9)
    wanted = m1.generate(prompt, greedy(1, prompt_logprobs=2)).prompt_logprobs
    for number in range(2):
        output = engine.generate(prompt, params)
        assert_same_logprobs(output.prompt_logprobs, wanted, exact_ranks=False)
        assert engine.stats().num_prompt_tokens == (number + 1) * (9 + 2), "once from the first token on"


@SHARING
def test_once_rated_a_retracted_prompt_may_come_from_the_cache(make_engine: MakeEngine, m1: Any, cache: str) -> None:
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(cache=cache))
    recorder = Recorder(engine.tracer)
    prompts = {"a": prompt_of(9), "b": prompt_of(13, 1)}
    for rid, prompt in prompts.items():
        engine.add_request(prompt, greedy(8, prompt_logprobs=2), request_id=rid)
    outputs = run(engine)
    again = [admit for admit in recorder.events("admit") if admit.num_output_tokens]
    assert again and all(admit.prefix >= len(prompts[admit.rid]) // 4 * 4 for admit in again)
    for rid, prompt in prompts.items():
        wanted = m1.generate(prompt, greedy(8, prompt_logprobs=2)).prompt_logprobs
        assert_same_logprobs(outputs[rid].prompt_logprobs, wanted, exact_ranks=False)


@pytest.mark.sample(1)
def test_logprobs_of_prompt_and_output_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, cache: str) -> None:
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(4, cache=cache))
    for _ in range(2):  # the second time everything is cached
        answers.check_logprobs(engine, make_m1(), lengths=(13, 1, 21, 5, 8, 17), top_k=5, exact_ranks=False)
    assert engine.stats().num_retractions > 0
    assert (engine.stats().num_cached_tokens > 0) == (cache != "chunk")
