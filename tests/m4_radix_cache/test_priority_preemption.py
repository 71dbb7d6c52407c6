"""Priority preemption: who loses its place, when nobody does, and what a preempted request keeps.

The rule is stated a second time, over the pages of rows, and compared on random queues. On the test-bed every KV slot
is read, so a wrong release is seen as a wrong answer.
"""

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m4_radix_cache import ConfigError, SamplingParams, SchedulerConfig
from m4_radix_cache.request import Req
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import EOS, Alone, SharingAsk
from tests.m4_radix_cache.conversations import check_two_turns
from tests.m4_radix_cache.engines import (
    MakeEngine,
    check_answers,
    check_flushed,
    check_step,
    ids,
    run,
    scheduler_of,
    setting,
)
from tests.m4_radix_cache.test_equivalence_properties import ASKS, LIMITS
from tests.support.amounts import examples
from tests.support.engines import Remembered, greedy
from tests.testbed.outcomes import check_ends, check_progress
from tests.testbed.radix import CACHES, RadixBed, make_radix_bed
from tests.testbed.radix_traffic import Traffic, traffic

MAX_MODEL_LEN = 40
URGENT = 20


def make_bed(**more: Any) -> RadixBed:
    """A bed whose scheduler preempts by priority, at the default threshold."""
    return make_radix_bed(**{"schedule_policy": "priority", "priority_preemption": True, "trace": True} | more)


def victims_of(bed: RadixBed) -> list[str]:
    """Those who were preempted, in order."""
    return [rid for event in bed.events("preempt") for rid in event.rids[1:]]


# --- who loses its place ----------------------------------------------------------------------------------------------


def pages_of(bed: RadixBed, req: Req) -> set[int]:
    """The pages that a running request reads or owns."""
    slots = bed.pools.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
    return set((slots // bed.pools.tree_cache.page_size).tolist())


def named_by_the_rule(bed: RadixBed, new: Req, *, threshold: int, ratio: float) -> list[str]:
    """SEMANTICS S3 over sets of pages: those that no other running request reads, nor the newcomer, become free."""
    pools, page_size = bed.pools, bed.pools.tree_cache.page_size
    running: list[Req] = list(bed.scheduler.running_batch.reqs)
    limit = len(new.origin_input_ids) - 1
    prefix = pools.tree_cache.match_prefix(new.key, limit).device_indices
    extend = len(new.origin_input_ids) - len(prefix)
    rows = pools.req_to_token_pool.size - len(running)

    def fits(without: list[Req]) -> bool:
        stay = [req for req in running if req not in without]
        used = set((prefix // page_size).tolist()).union(*(pages_of(bed, req) for req in stay))
        free = pools.token_to_kv_pool_allocator.size - len(used) * page_size
        to_come = sum(req.max_new_tokens - len(req.output_ids) for req in stay)
        kept = max(int(to_come * ratio), page_size * len(stay))
        has_row = rows + len(without) > 0
        return has_row and extend + new.max_new_tokens < free - kept

    lower = sorted((r for r in running if new.priority - r.priority > threshold), key=lambda r: (r.priority, -r.number))
    for number in range(len(lower) + 1):
        if fits(lower[:number]):
            return [req.rid for req in lower[:number]]
    return []


@pytest.mark.parametrize("number", [100, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_an_urgent_arrival_evicts_exactly_the_victims_that_the_rule_names(number: int) -> None:
    rng, seen = random.Random(5), Counter[str]()
    for _ in range(number):
        page_size, num_seqs, threshold = rng.choice([1, 2, 4]), rng.choice([4, 9]), rng.choice([0, 1, 3])
        bed = make_bed(
            num_tokens=rng.choice([40, 50, 60]),
            page_size=page_size,
            prefix_cache=rng.choice(list(CACHES)),
            max_num_seqs=num_seqs,
            conservativeness=rng.choice([0.0, 0.0, 0.5]),
            preemption_threshold=threshold,
        )
        for _ in range(rng.randint(3, 8)):  # of many lengths, priorities and common stems
            same_as = rng.choice([None, *bed.reqs])
            bed.add(rng.randint(2, 9), rng.randint(6, 16), same_as=same_as, priority=rng.randint(-3, 3))
            bed.step()
        bed.scheduler.merge_last_batch()
        if bed.scheduler.waiting_queue:
            continue
        before, ratio = bed.running(), bed.scheduler.new_token_ratio.value
        new = bed.add(
            rng.randint(2, 34), rng.randint(1, 16), same_as=rng.choice([None, *bed.reqs]), priority=rng.randint(0, 4)
        )
        named = named_by_the_rule(bed, bed.reqs[new], threshold=threshold, ratio=ratio)
        bed.recorder.records.clear()
        step = bed.step()
        assert victims_of(bed) == named
        assert (new in step.counts) == (new not in bed.waiting())
        seen["preempted"] += bool(named)
        seen["several"] += len(named) > 1
        seen["in vain"] += new in bed.waiting() and bool(before)
        bed.drain()
        bed.flush()
    assert min(seen["preempted"], seen["several"], seen["in vain"]) > number // 20, seen


def test_the_newcomer_runs_in_the_step_in_which_the_newest_of_the_least_urgent_loses_its_place() -> None:
    bed = make_bed(max_num_seqs=3)
    for priority in (0, 5, 0):
        bed.add(6, 9, priority=priority), bed.step()
    bed.add(6, 4, priority=URGENT)
    assert bed.step().counts == {"r3": 6} and victims_of(bed) == ["r2"]
    (event,) = bed.events("preempt")
    assert (event.priorities, event.threshold, event.token_counts) == ((URGENT, 0), 10, (6,))
    assert bed.drain()["r2"] == "length" and bed.scheduler.num_preemptions == 1


@pytest.mark.parametrize(("priority", "is_preempted"), [(10, False), (11, True)])
def test_a_priority_must_exceed_another_one_by_more_than_the_threshold(priority: int, is_preempted: bool) -> None:
    bed = make_bed(max_num_seqs=1)
    bed.add(6, 9), bed.step()
    bed.add(6, 4, priority=priority), bed.step()
    assert (victims_of(bed) == ["r0"]) == is_preempted
    bed.drain()


def test_nobody_is_preempted_if_it_does_not_help() -> None:
    """What a request shares with others that stay does not become free."""
    bed = make_bed(num_tokens=40, conservativeness=0, max_num_seqs=4)
    bed.add(20, 3, priority=15), bed.step()
    bed.add(21, 3, same_as="r0"), bed.step()  # owns next to nothing
    bed.add(18, 4, priority=URGENT), bed.step()
    assert victims_of(bed) == [] and bed.waiting() == ["r2"]
    bed.drain()


def test_nobody_is_preempted_for_a_prompt_that_has_no_room_in_this_step() -> None:
    bed = make_bed(max_num_seqs=2, max_num_batched_tokens=16)
    bed.add(6, 9), bed.step(), bed.add(6, 9), bed.step()
    bed.add(9, 4, priority=URGENT), bed.add(9, 4, priority=URGENT)
    assert bed.step().counts == {"r2": 9} and victims_of(bed) == ["r1"], "both prompts exceed 16 tokens"
    assert bed.step().counts == {"r3": 9} and victims_of(bed) == ["r1", "r0"]
    bed.drain()


def test_nobody_is_preempted_if_there_is_room() -> None:
    bed = make_bed(max_num_seqs=4)
    bed.add(6, 9), bed.step()
    bed.add(6, 4, priority=URGENT), bed.step()
    assert victims_of(bed) == [] and bed.running() == ["r0", "r1"]
    bed.drain()


# --- what becomes of them ---------------------------------------------------------------------------------------------


def test_a_preempted_request_waits_in_its_own_order_and_comes_back_through_the_cache() -> None:
    bed = make_bed(max_num_seqs=1)
    bed.add(6, 9), bed.step(), bed.step()
    bed.add(6, 2, priority=URGENT), bed.add(6, 2, priority=1), bed.add(6, 2)
    assert bed.step().counts == {"r1": 6}
    assert not bed.reqs["r0"].is_retracted and bed.waiting() == ["r2", "r3", "r0"]
    order = []
    while bed.scheduler.requests:
        step = bed.step()
        order += [rid for rid in step.output.rids if step.output.mode == "extend"]
        if step.output.mode == "extend" and "r0" in step.counts:
            assert step.output.hits["r0"] == 7 and step.counts["r0"] == 1, "all but its newest token is cached"
    assert order == ["r2", "r0", "r3"], "by priority, then by arrival"


def test_no_other_request_takes_the_room_before_a_preempted_one_that_comes_first() -> None:
    bed = make_bed(num_tokens=40, conservativeness=0, max_num_seqs=3)
    bed.add(12, 9), bed.step(), bed.add(12, 9), bed.step()
    bed.add(14, 1, priority=URGENT), bed.add(2, 1)
    assert set(bed.step().counts) == {"r2"} and victims_of(bed) == ["r1"]
    bed.drain()


def test_a_preempted_request_leaves_room_that_others_may_try() -> None:
    bed = make_bed(num_tokens=40, conservativeness=0, max_num_seqs=4)
    bed.add(24, 9), bed.step(), bed.add(20, 2), bed.step()
    assert bed.scheduler.batch_is_full, "the second one lacks memory"
    bed.add(14, 2, priority=URGENT)
    assert set(bed.step().counts) == {"r2"} and victims_of(bed) == ["r0"] and not bed.scheduler.batch_is_full
    bed.drain()


def test_a_request_is_not_preempted_again_before_it_has_a_new_token() -> None:
    bed = make_bed(max_num_seqs=1)
    bed.add(6, 5), bed.step()
    for number in range(1, 5):
        bed.add(3, 1, priority=URGENT), bed.step()  # the urgent one runs and ends
        said = len(bed.said("r0"))
        assert len(victims_of(bed)) == number and said == number
        bed.step()  # it is back, with one more token
        assert len(bed.said("r0")) == said + 1
    bed.drain()


def test_what_was_sent_is_not_sent_again_and_the_first_report_of_cached_tokens_stays() -> None:
    bed = make_bed(max_num_seqs=1)
    bed.add(6, 5), bed.step(), bed.step()
    before = bed.said("r0")
    bed.add(3, 1, priority=URGENT), bed.step()
    assert bed.said("r0") == before
    bed.step()
    assert bed.said("r0")[: len(before)] == before and len(bed.said("r0")) == len(before) + 1
    assert bed.reqs["r0"].cached_tokens == 0
    bed.drain()


# --- random traffic ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(traffic(preempting=True))
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic) -> None:
    bed = make_radix_bed(max_model_len=MAX_MODEL_LEN, **vars(traffic.limits), tensors=True)
    check_ends(traffic, bed, MAX_MODEL_LEN)


@settings(max_examples=examples(25))
@given(traffic(preempting=True, disturbed=False))
def test_every_step_makes_progress_whatever_the_priorities(traffic: Traffic) -> None:
    check_progress(traffic, make_radix_bed(max_model_len=MAX_MODEL_LEN, **vars(traffic.limits)))


def test_tokens_penalties_and_seeds_are_kept(make_engine: MakeEngine, m1: Remembered) -> None:
    params = {
        "greedy": greedy(14),
        "penalties": greedy(14, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4),
        "drawn": SamplingParams(max_tokens=14, temperature=0.9, seed=5, top_k=20, ignore_eos=True),
    }
    asked = {name: (ids(9 + place), own) for place, (name, own) in enumerate(params.items())}
    urgent = {f"urgent {number}": (ids(5), greedy(2)) for number in range(6)}
    limits = setting(3, policy="priority", scheduler_class=preempting)
    with make_engine(**limits) as engine:
        for name, (prompt, own) in asked.items():
            engine.add_request(prompt, own, request_id=name)
        outputs: dict[str, Any] = {}
        for name, (prompt, own) in urgent.items():
            outputs |= engine.step() | engine.step() | engine.step()
            engine.add_request(prompt, own, request_id=name, priority=URGENT)
        outputs |= run(engine)
        assert engine.stats().num_preemptions >= 3 and not engine.stats().num_retractions
        check_answers(outputs, m1, asked | urgent)


def preempting(**limits: Any) -> SchedulerConfig:
    return SchedulerConfig(priority_preemption=True, **limits)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority_preemption": True}, "priority_preemption=True has no effect with schedule_policy='lpm'"),
        ({"preemption_threshold": 3}, "preemption_threshold=3 has no effect without priority_preemption"),
        ({"schedule_policy": "priority", "preemption_threshold": 3}, "preemption_threshold=3 has no effect"),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**values)


def test_an_engine_that_does_not_preempt_is_as_before(make_engine: MakeEngine) -> None:
    with make_engine(**setting(1, policy="priority")) as engine:
        engine.add_request(ids(5), greedy(6)), engine.step()
        engine.add_request(ids(5), greedy(2), request_id="urgent", priority=URGENT), engine.step()
        assert [req.rid for req in scheduler_of(engine).waiting] == ["urgent"]
        run(engine)
        assert not engine.stats().num_preemptions


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("radix", 4), ("radix", 16), ("hash", 4), ("chunk", 4)])
def test_any_traffic_gets_the_tokens_of_m1(make_engine: MakeEngine, alone: Alone, cache: str, page_size: int) -> None:
    """As without preemption: `test_equivalence_properties.py` compares that with the same answers."""
    references: list[Reference] = []
    num_preemptions = 0

    @settings(max_examples=10)
    @given(asks=st.lists(ASKS, min_size=5, max_size=8), limits=LIMITS, spare_tokens=st.integers(0, 60))
    def holds(asks: list[SharingAsk], limits: dict[str, Any], spare_tokens: int) -> None:
        nonlocal num_preemptions
        longest = max(ask.prompt_len for ask in asks)
        tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size
        limits |= {"policy": "priority", "scheduler_class": partial(preempting, preemption_threshold=0)}
        configs = setting(tokens=tokens, page_size=page_size, cache=cache, **limits)
        with make_engine(eos_token_ids=EOS, **configs) as engine:
            found, _ = check_two_turns(engine, asks, alone, check_step, tokens=tokens, most=tokens - 2)
            references.extend(found)
            num_preemptions += engine.stats().num_preemptions
            check_flushed(engine)

    holds()
    check_cuts(references)
    assert num_preemptions > 4
