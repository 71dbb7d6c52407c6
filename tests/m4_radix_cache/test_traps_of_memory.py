"""The known ways in which an engine goes wrong when memory is short or somebody is given up.

A request that was retracted must come back as the one that it was, one that can never fit must be told so, and one that
is aborted must give back everything, locks in the cache included, wherever it stands.
"""

from typing import Any

import pytest

from m4_radix_cache import KVCapacityError, SamplingParams
from tests.equivalence.forced_retraction import ForcedRetraction
from tests.equivalence.traffic import CLEAR_SETTINGS, prompt_of
from tests.m4_radix_cache.engines import (
    MakeEngine,
    OnEvent,
    check_answers,
    check_drained,
    check_flushed,
    check_step,
    greedy,
    run,
    scheduler_of,
    setting,
    submit,
    unfinished,
)

FEW_TOKENS = {token_id: 50.0 for token_id in range(60, 68)}  # so few that each comes again, and every penalty counts
EVERYTHING = CLEAR_SETTINGS["drawn with everything"] | {
    "ignore_eos": True,
    "logit_bias": FEW_TOKENS,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
}


# --- too little memory ------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_retracted_request_keeps_its_seed_its_penalties_and_what_it_said(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    limits = setting(4, tokens=80, page_size=page_size, cache=cache, policy="fcfs", conservativeness=0)
    engine = make_engine(**limits)
    asked = {
        f"r{n}": (prompt_of(9 + n), SamplingParams(**EVERYTHING | {"max_tokens": 30 - n, "seed": n})) for n in range(4)
    }
    streamed: dict[str, tuple[int, ...]] = dict.fromkeys(asked, ())
    coming = list(asked.items())
    submit(engine, dict([coming.pop(0)]))
    for _ in unfinished(engine):
        for rid, output in engine.step().items():
            assert len(output.token_ids) == len(streamed[rid]) + 1, "each token is told once"
            assert output.token_ids[:-1] == streamed[rid]
            assert output.metrics.cached_tokens == 0, "what it finds of its own does not count"
            streamed[rid] = output.token_ids
        check_step(engine)
        if coming:  # one in each step: all are let in, because the others have said little
            submit(engine, dict([coming.pop(0)]))
    check_drained(engine)
    assert engine.stats().num_retractions > 0
    for rid, (prompt, params) in asked.items():
        assert streamed[rid] == m1.generate(prompt, params).token_ids, rid


def test_a_request_that_can_never_fit_is_refused_at_once(make_engine: MakeEngine, cache: str) -> None:
    engine = make_engine(**setting(tokens=32, cache=cache))
    with pytest.raises(KVCapacityError, match=r"31 prompt tokens.*room for 32"):
        engine.add_request(prompt_of(31), greedy(1))
    assert not engine.has_unfinished_requests()
    large, small = engine.generate_batch([prompt_of(40), prompt_of(30)], greedy(1)).values()
    assert isinstance(large.error, KVCapacityError) and large.finish_reason == "error"
    assert small.finish_reason == "length" and len(small.token_ids) == 1
    assert engine.stats().num_prompt_tokens == 30


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_that_outgrows_all_memory_ends_with_an_error_and_alone(
    make_engine: MakeEngine, m1: Any, cache: str, page_size: int
) -> None:
    engine = make_engine(**setting(tokens=32, page_size=page_size, cache=cache, conservativeness=0))
    asked = {"grows": (prompt_of(9), greedy(60)), "small": (prompt_of(5), greedy(8))}
    submit(engine, asked)
    outputs = run(engine)
    assert isinstance(outputs["grows"].error, KVCapacityError)
    said = len(outputs["grows"].token_ids)
    assert 32 - page_size < 9 + said <= 33, "it had all the memory"
    assert outputs["grows"].token_ids == m1.generate(*asked["grows"]).token_ids[:said]
    check_answers(outputs, m1, {"small": asked["small"]})
    assert engine.stats().num_steps < 60
    check_flushed(engine)


# --- giving up --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("cache", "steps"),
    [*(("radix", steps) for steps in (0, 1, 2, 3, 4, 6)), ("hash", 1), ("hash", 3), ("chunk", 1), ("chunk", 3)],
)
def test_an_abort_in_every_state_leaves_nothing_and_changes_nobody(
    make_engine: MakeEngine, m1: Any, cache: str, steps: int
) -> None:
    """Waiting, prefilled and not merged, decoding, retracted: whoever it is, and with others that share its prompt."""
    common = prompt_of(8)
    asked = {rid: ([*common, *prompt_of(n, n)], greedy(9)) for n, rid in enumerate("abcd")}
    states = set()
    for victim in asked:
        engine = make_engine({"scheduler": ForcedRetraction}, **setting(3, tokens=64, cache=cache, policy="fcfs"))
        submit(engine, asked)
        said: dict[str, tuple[int, ...]] = {}
        for _ in range(steps):
            said |= {rid: output.token_ids for rid, output in engine.step().items()}
            check_step(engine)
        req = scheduler_of(engine).requests[victim]
        states.add((req.status.value, req in scheduler_of(engine).running_batch.reqs))
        assert engine.abort_request(victim) and not engine.abort_request(victim)
        outputs = engine.step()
        check_step(engine)
        assert outputs[victim].finish_reason == "abort" and outputs[victim].token_ids == said.get(victim, ())
        outputs |= run(engine)
        assert engine.stats().num_finished["abort"] == 1
        check_answers(outputs, m1, {rid: ask for rid, ask in asked.items() if rid != victim})
        check_flushed(engine)
    wanted = {0: "waiting", 1: "running", 2: "running"}
    assert wanted.get(steps, "running") in {state for state, _ in states}
    if steps == 1:
        assert ("running", False) in states, "prefilled and not merged"
    if steps in (3, 6):
        assert "preempted" in {state for state, _ in states}


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("kind", "nth"),
    [("policy_order", 1), ("admit", 1), ("admit", 2), ("batch", 1), ("batch", 3), ("retract", 1), ("result", 4)],
)
def test_an_abort_within_a_step_takes_effect_at_its_end(
    make_engine: MakeEngine, m1: Any, cache: str, kind: str, nth: int
) -> None:
    engine = make_engine({"scheduler": ForcedRetraction}, **setting(3, tokens=64, cache=cache, policy="fcfs"))
    common = prompt_of(8)
    asked = {rid: ([*common, *prompt_of(n, n)], greedy(9)) for n, rid in enumerate("abc")}
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("b"), nth=nth)
    submit(engine, asked)
    outputs = run(engine)
    assert reader.acted and reader.result is True and reader.error is None
    assert outputs["b"].finish_reason == "abort"
    check_answers(outputs, m1, {rid: asked[rid] for rid in "ac"})
    check_flushed(engine)
