"""How much is computed when requests begin alike, counted to the token."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import m1_single_request
import m2_continuous_batching
import m3_paged_attention
from m4_radix_cache import LLMEngine
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.equivalence.traffic import prompt_of, tree_prompt
from tests.m4_radix_cache.engines import MakeEngine, Recorder, check_flushed, greedy, run, setting

SHARING = pytest.mark.parametrize("cache", ["radix", "hash"])
SYSTEM = prompt_of(40)
USERS = [[*SYSTEM, *prompt_of(3 + n, n)] for n in range(5)]
OWN = 3 + 4 + 5 + 6 + 7


def ask_all(engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 3) -> list[Any]:
    """Their last outputs, all asked at once."""
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(max_tokens), request_id=str(number))
    outputs = run(engine)
    return [outputs[str(number)] for number in range(len(prompts))]


# --- a system prompt for many users -----------------------------------------------------------------------------------


@SHARING
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_of_requests_with_one_system_prompt_one_computes_it_and_the_others_find_it(
    make_engine: MakeEngine, cache: str, policy: str
) -> None:
    engine = make_engine(**setting(8, cache=cache, policy=policy))
    recorder = Recorder(engine.tracer)
    outputs = ask_all(engine, USERS)
    assert [output.metrics.cached_tokens for output in outputs] == [0, 40, 40, 40, 40]
    assert [event.rids for event in recorder.events("batch")][:2] == [("0",), ("1", "2", "3", "4")]
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (40 + OWN, 160)
    assert stats.hit_rate == pytest.approx(160 / (200 + OWN))
    assert not recorder.events("duplicates_freed")


@SHARING
def test_a_policy_that_does_not_look_lets_all_compute_it_and_keeps_it_once(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(**setting(8, cache=cache, policy="fcfs"))
    recorder = Recorder(engine.tracer)
    assert all(output.metrics.cached_tokens == 0 for output in ask_all(engine, USERS))
    assert engine.stats().num_prompt_tokens == 200 + OWN
    assert [event.num_tokens for event in recorder.events("duplicates_freed")] == [40] * 4
    kept = sum((len(prompt) + 2) // 4 * 4 - 40 for prompt in USERS)
    assert engine.stats().evictable_size == 40 + kept
    assert all(output.metrics.cached_tokens >= 40 for output in ask_all(engine, USERS)), "now it is there"


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@SHARING
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_request_finds_the_longest_beginning_that_anybody_had(
    make_engine: MakeEngine, cache: str, page_size: int
) -> None:
    """Against a list of all that was said so far."""
    num_found = [0]

    @settings(max_examples=8)
    @given(asked=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 15)), min_size=8, max_size=16))
    def holds(asked: list[tuple[int, int]]) -> None:
        with make_engine(**setting(page_size=page_size, cache=cache)) as engine:
            said: list[list[int]] = []
            for length, path in asked:
                prompt = tree_prompt(length, path)
                output = engine.generate(prompt, greedy(2))
                found = max((common(prompt, other) // page_size * page_size for other in said), default=0)
                found = min(found, (length - 1) // page_size * page_size)
                assert output.metrics.cached_tokens == found
                num_found[0] += found
                said.append([*prompt, output.token_ids[0]])
            kept = {tuple(one[:end]) for one in said for end in range(page_size, len(one) + 1, page_size)}
            assert engine.stats().evictable_size == len(kept) * page_size, "each page once"
            check_flushed(engine)

    holds()
    assert num_found[0] > 100


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@SHARING
def test_a_retracted_request_finds_what_others_have_of_it(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(8, cache=cache))
    recorder = Recorder(engine.tracer)
    outputs = ask_all(engine, USERS, max_tokens=9)
    again = [admit for admit in recorder.events("admit") if admit.num_output_tokens]
    assert len(again) == engine.stats().num_retractions > 1
    whole_pages = {admit.rid: len(USERS[int(admit.rid)]) // 4 * 4 for admit in again}
    assert all(admit.prefix >= whole_pages[admit.rid] for admit in again), "its prompt, or more if it came back before"
    assert again[0].prefix == whole_pages[again[0].rid]
    assert [output.metrics.cached_tokens for output in outputs] == [0, 40, 40, 40, 40], "as when it first ran"


# --- forgetting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [m1_single_request, m2_continuous_batching, m3_paged_attention])
def test_before_m4_there_is_no_cache_to_flush(package: ModuleType) -> None:
    assert "flush_cache" not in dir(package.LLMEngine)


def test_a_flush_is_refused_while_anybody_waits_or_runs(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(**setting(cache=cache))
    engine.generate(SYSTEM, greedy(2))
    engine.add_request(SYSTEM, greedy(5), request_id="p")
    for _ in range(3):
        assert not engine.flush_cache()
        engine.step()
    output = run(engine)["p"]
    assert output.finish_reason == "length"
    assert output.metrics.cached_tokens == (0 if cache == "chunk" else 36)
    check_flushed(engine)
