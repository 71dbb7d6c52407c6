"""Priority preemption beside pieces of prompts, decodes and drafts: tokens, progress, and who is no victim.

The rule itself is tested with m4; the test-bed judges every decision by it.
"""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, Alone, SharingAsk
from tests.m4_radix_cache.conversations import check_two_turns, conversations
from tests.m5_chunked_prefill_spec.engines import MakeEngine, check_flushed, check_step, setting
from tests.m5_chunked_prefill_spec.test_equivalence_properties import GREEDY, LENGTHS, LIMITS, SPECULATORS
from tests.m5_chunked_prefill_spec.test_scheduler_properties import (
    CUTS,
    MAX_MODEL_LEN,
    Cuts,
    any_traffic,
    check_rated,
)
from tests.support.amounts import examples
from tests.testbed.outcomes import check_ends, check_progress
from tests.testbed.pieces import PiecesBed, make_pieces_bed
from tests.testbed.radix_traffic import Traffic

PREEMPTING: dict[str, Any] = {"policy": "priority", "priority_preemption": True, "preemption_threshold": 0}


def make_bed(**more: Any) -> PiecesBed:
    return make_pieces_bed(**{"schedule_policy": "priority", "priority_preemption": True, "trace": True} | more)


@settings(max_examples=examples(80))
@given(any_traffic(preempting=True), CUTS)
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic, cuts: Cuts) -> None:
    check_ends(traffic, cuts.bed(traffic, tensors=True), MAX_MODEL_LEN, check_rated)


@settings(max_examples=examples(25))
@given(any_traffic(preempting=True, disturbed=False), CUTS)
def test_every_step_makes_progress_whatever_the_priorities(traffic: Traffic, cuts: Cuts) -> None:
    check_progress(traffic, cuts.bed(traffic))


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])
def test_the_newcomer_runs_in_the_step_of_the_preemption_and_the_others_decode(schedule: str) -> None:
    bed = make_bed(max_num_seqs=3, max_num_batched_tokens=32, schedule=schedule)
    for priority in (0, 5, 0):
        bed.add(6, 9, priority=priority), bed.step()
    bed.add(6, 4, priority=20)
    step = bed.step().output
    assert step.prompts == {"r3": 6} and bed.waiting() == ["r2"]
    assert sorted(step.decodes) == (["r0", "r1"] if schedule == "decode_first" else [])
    bed.drain()


def test_the_request_in_pieces_is_no_victim() -> None:
    """Its next piece is in the batch before any waiting request is tried."""
    bed = make_bed(max_num_seqs=1, max_num_batched_tokens=8)
    bed.add(30, 4), bed.step()
    assert bed.chunked() == "r0"
    bed.add(6, 2, priority=20)
    while bed.chunked():
        bed.step()
    assert bed.waiting() == ["r1"] and not bed.events("preempt")
    bed.step()
    assert bed.running() == ["r1"] and bed.waiting() == ["r0"], "with its first token it is one"
    bed.drain()


def test_nobody_is_preempted_for_a_prompt_that_has_no_token_in_this_step() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    for _ in range(4):
        bed.add(1, 9), bed.step()
    bed.add(3, 2, priority=20), bed.step()
    assert not bed.events("preempt") and bed.waiting() == ["r4"], "four decodes fill the step"
    bed.drain()


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("speculator", ["none", "random", "draft_model"])
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("radix", 16), ("hash", 4), ("chunk", 4)])
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, cache: str, page_size: int, speculator: str
) -> None:
    references: list[Reference] = []
    seen = {"preempted": 0, "cached": 0}
    own = dict(SPECULATORS[speculator])
    parts = {"proposer": own.pop("proposer")} if "proposer" in own else {}
    names = GREEDY if speculator == "draft_model" else list(CLEAR_SETTINGS)

    @settings(max_examples=10)
    @given(
        traffic=st.lists(conversations(LENGTHS, names), min_size=5, max_size=8),
        limits=LIMITS,
        spare_tokens=st.integers(0, 60),
        budget=st.sampled_from([16, 17, 23, 64]),
    )
    def holds(traffic: list[SharingAsk], limits: dict[str, Any], spare_tokens: int, budget: int) -> None:
        longest = max(ask.prompt_len for ask in traffic)
        tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size
        configs = setting(
            tokens=tokens, page_size=page_size, cache=cache, max_num_batched_tokens=budget, **own | limits | PREEMPTING
        )
        with make_engine(parts, eos_token_ids=EOS, **configs) as engine:
            found, _ = check_two_turns(engine, traffic, alone, check_step, tokens=tokens, most=tokens - 2)
            references.extend(found)
            seen["preempted"] += engine.stats().num_preemptions
            seen["cached"] += engine.stats().num_cached_tokens
            check_flushed(engine)

    holds()
    check_cuts(references)
    assert seen["preempted"] > 2, seen
