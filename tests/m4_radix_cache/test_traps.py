"""The known ways in which an engine with a prefix cache goes wrong, one test each.

Most of them show nowhere but in a wrong token, much later, or in memory that is short for ever. So each test compares
with m1, looks at the memory after every step, and says how many tokens may be computed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from m4_radix_cache import ForwardError, SamplingParams
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.model_runner import ModelRunner
from tests.equivalence.traffic import prompt_of
from tests.m4_radix_cache.engines import (
    MakeEngine,
    Moment,
    Recorder,
    cached_len,
    check_answers,
    check_drained,
    check_flushed,
    check_step,
    failing_runner,
    greedy,
    run,
    scheduler_of,
    setting,
    submit,
)

SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])


# --- sharing within a batch -------------------------------------------------------------------------------------------


@SHARING
@pytest.mark.parametrize("page_size", [1, 4])
def test_two_requests_with_one_prefix_in_one_batch_own_every_page_once(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    """Both compute it, because neither finds it. The second one's copy is freed; it must not read it any more."""
    engine = make_engine(**setting(8, tokens=80, page_size=page_size, cache=cache, policy="fcfs"))
    recorder, common = Recorder(engine.tracer), prompt_of(12)
    asked = {
        "a": ([*common, 5, 6], greedy(9)),
        "b": ([*common, 7, 8], greedy(9)),
        "c": (common, greedy(12)),
    }
    submit(engine, asked)
    outputs = engine.step()
    check_step(engine)
    (batch,) = recorder.events("batch")
    assert (batch.rids, batch.prefix_lens) == (("a", "b", "c"), (0, 0, 0))
    copies = [(event.rid, event.num_tokens) for event in recorder.events("duplicates_freed")]
    assert copies == [("b", 12), ("c", 12)]
    # Those who come now get the pages that came free, while the others go on reading what they share.
    late = {f"d{n}": (prompt_of(9, n), greedy(4)) for n in range(2, 6)}
    submit(engine, late)
    outputs = run(engine)
    check_answers(outputs, m1, asked | late)
    check_flushed(engine)


# --- a prompt that is cached whole ------------------------------------------------------------------------------------


@SHARING
@pytest.mark.parametrize(("page_size", "length"), [(1, 1), (1, 5), (1, 12), (4, 5), (4, 13)])
def test_of_a_prompt_that_is_cached_whole_one_token_is_computed(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int, length: int
) -> None:
    engine, params = make_engine(**setting(page_size=page_size, cache=cache)), greedy(9)
    prompt = prompt_of(length)
    wanted = m1.generate(prompt, params).token_ids
    assert engine.generate(prompt, params).token_ids == wanted
    recorder = Recorder(engine.tracer)
    engine.add_request(prompt, params, request_id="again")
    engine.add_request(prompt_of(7, 1), params, request_id="other")  # together with one that computes more
    outputs = run(engine)
    (batch,) = [event for event in recorder.events("batch") if event.mode == "extend"]
    assert dict(zip(batch.rids, batch.extend_lens, strict=True)) == {"again": 1, "other": 7}
    assert outputs["again"].token_ids == wanted
    assert outputs["again"].metrics.cached_tokens == length - 1
    assert engine.stats().num_prompt_tokens == length + 1 + 7


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


@SHARING
def test_what_a_running_request_reads_is_not_evicted_for_others(make_engine: MakeEngine, m1: Any, cache: str) -> None:
    oldest_first = {"eviction_policy": "fifo"} if cache == "radix" else {}
    engine = make_engine(**setting(tokens=48, cache=cache, conservativeness=0, **oldest_first))
    first, second = prompt_of(12), prompt_of(12, 1)
    for prompt in (first, second):
        engine.generate(prompt, greedy(1))
    asked = {"reader": ([*first, 9], greedy(14))}
    submit(engine, asked)
    for _ in range(2):
        engine.step()
        check_step(engine)
    late = {"writer": (prompt_of(16, 2), greedy(4))}
    submit(engine, late)
    outputs = run(engine)
    assert outputs["reader"].metrics.cached_tokens == 12
    assert engine.stats().num_evicted_tokens >= 8 and not engine.stats().num_retractions
    check_answers(outputs, m1, asked | late)


@SHARING
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_evicted_page_that_others_wrote_into_is_never_found_again(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    """Three prompts in turn, in a memory for one and a half of them: every page changes hands again and again."""
    engine = make_engine(**setting(tokens=32, page_size=page_size, cache=cache))
    prompts, params = [prompt_of(17), prompt_of(17, 1), [*prompt_of(9), *prompt_of(8, 1)]], greedy(4)
    wanted = [m1.generate(prompt, params).token_ids for prompt in prompts]
    pages: list[set[int]] = []
    for number in (0, 1, 0, 1, 2, 0, 2, 2):
        engine.add_request(prompts[number], params, request_id="p")
        engine.step()
        (req,) = scheduler_of(engine).running
        row = scheduler_of(engine).pools.req_to_token_pool.read(req.req_pool_idx or 0, 0, 17)
        pages.append(set((row // page_size).tolist()))
        output = run(engine)["p"]
        assert output.token_ids == wanted[number]
        assert output.metrics.cached_tokens <= 16
    assert output.metrics.cached_tokens == 16, "but what is there is found"
    assert pages[0] & pages[1], "the same pages held other tokens"
    assert engine.stats().num_evicted_tokens > 48


# --- what a request leaves behind -------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@SHARING
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_second_turn_finds_prompt_and_answer_of_the_first(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    """100 tokens and 50 of an answer, the last of which has no KV; then these and 50 new ones."""
    engine = make_engine(**setting(page_size=page_size, cache=cache))
    first = engine.generate(prompt_of(100), greedy(50))
    prompt = [*prompt_of(100), *first.token_ids, *prompt_of(50, 1)]
    output = engine.generate(prompt, greedy(4))
    assert output.metrics.cached_tokens == 149 // page_size * page_size
    assert engine.stats().num_prompt_tokens == 100 + 200 - output.metrics.cached_tokens
    assert output.token_ids == m1.generate(prompt, greedy(4)).token_ids


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


@SHARING
def test_a_request_finds_nothing_under_another_salt(make_engine: MakeEngine, m1: Any, cache: str) -> None:
    engine, prompt, params = make_engine(**setting(page_size=1, cache=cache)), prompt_of(12), greedy(3)
    wanted = m1.generate(prompt, params).token_ids
    found = []
    for salt in (None, "a", "b", None, "a", "b", ""):
        options = {"cache_salt": salt} if salt else {}
        output = engine.generate(prompt, params, **options)
        assert output.token_ids == wanted
        found.append(output.metrics.cached_tokens)
    assert found == [0, 0, 0, 11, 11, 11, 11]
    assert engine.stats().evictable_size == 3 * 14, "each namespace has its own"


@SHARING
def test_requests_under_different_salts_do_not_wait_for_each_other(make_engine: MakeEngine, cache: str) -> None:
    engine, recorder = make_engine(**setting(cache=cache)), []
    recorder = Recorder(engine.tracer)
    for salt in ("a", "b", "b"):
        engine.add_request(
            prompt_of(60), greedy(2), request_id=f"{salt}{len(recorder.events('request_added'))}", cache_salt=salt
        )
    outputs = run(engine)
    batches = [(event.rids, event.prefix_lens) for event in recorder.events("batch") if event.mode == "extend"]
    assert batches == [(("a0", "b1"), (0, 0)), (("b2",), (56,))]
    assert [output.metrics.cached_tokens for output in outputs.values()] == [0, 0, 56]


@pytest.mark.parametrize("moment", ["before", "forward", "after"])
@SHARING
def test_a_prompt_whose_forward_failed_leaves_nothing_in_the_cache(
    make_engine: MakeEngine, m1: Any, cache: str, moment: Moment
) -> None:
    parts = {"model_runner": failing_runner(RuntimeError("broken"), rid="p", position=8, at=moment)}
    engine = make_engine(parts, **setting(page_size=4, cache=cache))
    first, params = prompt_of(8), greedy(5)
    engine.generate([*first, 1], greedy(1))
    prompt = [*first, *prompt_of(9, 1)]
    engine.add_request(prompt, params, request_id="p")
    outputs = run(engine)
    assert outputs["p"].finish_reason == "error" and outputs["p"].token_ids == ()
    assert engine.stats().evictable_size == cached_len(engine, prompt) == 8, "what others had computed"
    again = engine.generate(prompt, params)
    assert again.metrics.cached_tokens == 8 and again.token_ids == m1.generate(prompt, params).token_ids


class NoNumbers(ModelRunner):
    """Its first forward gives no numbers for the last token."""

    is_first = True

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = super().forward(batch)
        if self.is_first:
            self.is_first = False
            hidden[-1] = torch.nan
        return hidden


@SHARING
def test_a_prompt_with_logits_that_are_no_numbers_leaves_nothing_in_the_cache(
    make_engine: MakeEngine, m1: Any, cache: str
) -> None:
    engine = make_engine({"model_runner": NoNumbers}, **setting(page_size=4, cache=cache, policy="fcfs"))
    asked = {"good": (prompt_of(9), greedy(5)), "bad": (prompt_of(11, 1), greedy(5))}
    submit(engine, asked)
    outputs = run(engine)
    assert isinstance(outputs["bad"].error, ForwardError)
    assert cached_len(engine, prompt_of(11, 1)) == 0 and cached_len(engine, prompt_of(9)) == 8
    check_answers(outputs, m1, {"good": asked["good"]})
    again = engine.generate(*asked["bad"])
    assert again.metrics.cached_tokens == 0 and again.token_ids == m1.generate(*asked["bad"]).token_ids


@SHARING
def test_a_decode_that_failed_leaves_the_prompt_in_the_cache_and_no_output(
    make_engine: MakeEngine, m1: Any, cache: str
) -> None:
    prompt, params = prompt_of(9), greedy(9)
    wanted = m1.generate(prompt, params).token_ids
    parts = {"model_runner": failing_runner(RuntimeError("broken"), rid="p", position=12, at="after")}
    engine = make_engine(parts, **setting(page_size=1, cache=cache))
    engine.add_request(prompt, params, request_id="p")
    output = run(engine)["p"]
    assert (output.finish_reason, output.token_ids) == ("error", wanted[:4])
    assert engine.stats().evictable_size == cached_len(engine, [*prompt, *wanted]) == 9
    assert (
        engine.generate([*prompt, *wanted], greedy(3)).token_ids == m1.generate([*prompt, *wanted], greedy(3)).token_ids
    )
