"""Several outputs of one prompt (`n > 1`), as SGLang makes them: the children meet in the cache.

m3 forked a request's blocks and copied what two of them wrote into. Here the first child computes the prompt, the
others wait a step and find it, all but the last tokens. Without a cache each computes it for itself. The outputs
of a caller are tested for all milestones: `tests/engine_contract`.
"""

import pytest

from m4_radix_cache import RequestOutput
from tests.engine_contract.variants import M4_RADIX, FailingRunner
from tests.m4_radix_cache.engines import (
    MakeEngine,
    Recorder,
    Remembered,
    check_drained,
    check_step,
    greedy,
    ids,
    run,
    setting,
)
from tests.support.engines import check_begun
from tests.support.families import drawn

PROMPT = [31, 32, 33, 34, 35, 36]
SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])


def check_children(output: RequestOutput, m1: Remembered, prompt: list[int], num_tokens: int) -> None:
    """Each completion is m1's answer to a request of its own, as far as it got."""
    for seed, completion in enumerate(output.outputs, start=11):
        check_begun(completion, m1.generate(prompt, greedy(num_tokens, temperature=1.0, seed=seed)))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [1, 9])
def test_the_prompt_of_n_outputs_is_computed_once(
    make_engine: MakeEngine, m1: Remembered, cache: str, length: int, page_size: int
) -> None:
    engine = make_engine(**setting(8, page_size=page_size, cache=cache))
    output = engine.generate(ids(length), drawn(7))
    check_children(output, m1, ids(length), 7)
    found = 0 if cache == "chunk" else (length - 1) // page_size * page_size
    assert engine.stats().num_prompt_tokens == length + 3 * (length - found)
    assert engine.stats().num_cached_tokens == 3 * found
    assert output.metrics.cached_tokens == 0, "what one child has found of another was computed for this request"
    assert engine.generate(ids(length), drawn(7)).metrics.cached_tokens == found, "now all of them find it"
    check_drained(engine)


@SHARING
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "random"])
def test_the_others_wait_for_the_first_child_s_prompt(make_engine: MakeEngine, cache: str, policy: str) -> None:
    engine = make_engine(**setting(8, cache=cache, policy=policy))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(21), drawn(8), request_id="p")
    engine.add_request(ids(9, 50), drawn(8, n=1), request_id="other")
    engine.step()
    check_step(engine)
    (batch,) = recorder.events("batch")
    assert sorted(batch.rids) == ["other", "p/0"] and set(batch.prefix_lens) == {0}
    engine.step()
    batch = recorder.events("batch")[-1]
    assert (sorted(batch.rids), batch.prefix_lens, batch.extend_lens) == (["p/1", "p/2", "p/3"], (20,) * 3, (1,) * 3)
    check_step(engine)
    assert engine.stats().protected_size == 20 + 8, "the prompts' pages are there once"
    run(engine)


def test_the_kv_of_children_that_say_the_same_is_kept_once(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(page_size=1))
    output = engine.generate(PROMPT, greedy(5, n=3))
    assert len({completion.token_ids for completion in output.outputs}) == 1
    assert engine.stats().evictable_size == len(PROMPT) + 4


def test_salts_and_priorities_go_to_every_child(make_engine: MakeEngine, m1: Remembered) -> None:
    engine = make_engine(**setting(8, page_size=1, policy="priority"))
    recorder = Recorder(engine.tracer)
    engine.add_request(PROMPT, drawn(5, n=2), request_id="low", cache_salt="a")
    engine.add_request(PROMPT, drawn(5, n=2), request_id="high", cache_salt="b", priority=1)
    outputs = run(engine)
    extends = [event for event in recorder.events("batch") if event.mode == "extend"]
    assert [event.rids for event in extends] == [("high/0", "low/0"), ("high/1", "low/1")]
    assert [event.prefix_lens for event in extends] == [(0, 0), (5, 5)], "nobody finds what the other salt has"
    for output in outputs.values():
        check_children(output, m1, PROMPT, 5)


# --- without the first child ------------------------------------------------------------------------------------------


@SHARING
def test_a_prompt_whose_forward_failed_takes_only_the_first_child_along(
    make_engine: MakeEngine, m1: Remembered, cache: str
) -> None:
    """The others were not in that step. The error reaches the caller with the end of the family."""
    failing = FailingRunner(M4_RADIX, RuntimeError("broken"), rid="p/0", position=0)
    engine = make_engine(failing.parts, **setting(4, page_size=2, cache=cache))
    engine.add_request(PROMPT, drawn(), request_id="p")
    output = run(engine)["p"]
    assert output.finish_reason == "error" and "broken" in str(output.error)
    assert [completion.finish_reason for completion in output.outputs] == ["error", "length", "length", "length"]
    check_children(output, m1, PROMPT, 6)
    assert engine.stats().num_finished == {"error": 1}
