"""Preemption: the victim, its KV, the order of return, and requests that cannot run at all."""

import itertools
from collections.abc import Sequence

import pytest

from m1_single_request import SamplingParams
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import Request
from tests.testbed.bed import Step
from tests.testbed.fakes import make_request
from tests.testbed.paged import PagedBed, Squeezed, make_paged_bed

BOTH_MODES = pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])


def crowd(*, swap: bool, **limits: int) -> PagedBed:
    """Two requests of four tokens whose third blocks do not both fit into five."""
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=swap, trace=True, **limits)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    return bed


def step_until_preempted(bed: PagedBed) -> Step:
    while True:
        step = bed.step()
        if bed.preempted():
            return step


# --- the victim -------------------------------------------------------------------------------------------------------


def running(*lens: tuple[int, int]) -> list[Request]:
    """Requests with so many prompt and output tokens, in order of arrival."""
    requests = []
    for number, (num_prompt, num_output) in enumerate(lens):
        request = make_request(f"r{number}", [1] * num_prompt, SamplingParams(), request_class=Request)
        assert isinstance(request, Request)
        request.number = number + 1
        request.sequence.output_token_ids = [1] * num_output
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("lens", "victim"),
    [
        ([(5, 3), (5, 1), (5, 2)], 1),
        ([(9, 2), (1, 1), (9, 2)], 1),
        ([(5, 1), (6, 1), (4, 1)], 1),
        ([(5, 1), (5, 1), (5, 1)], 2),
        ([(5, 0)], 0),
    ],
    ids=["fewest outputs", "before all else", "then the longest prompt", "then the latest arrival", "the only one"],
)
def test_the_victim_loses_the_fewest_tokens(lens: Sequence[tuple[int, int]], victim: int) -> None:
    requests = running(*lens)
    for order in itertools.permutations(requests):
        assert FewestOutputsFirst().choose_victim(order) is requests[victim], "whatever the order of admission"


# --- what becomes of it -----------------------------------------------------------------------------------------------


@BOTH_MODES
def test_the_trace_names_the_victim_and_the_reason(swap: bool) -> None:
    bed = crowd(swap=swap)
    step_until_preempted(bed)
    (event,) = bed.events("preempted")
    assert (event.rid, event.mode) == ("r1", "swap" if swap else "recompute")
    assert (event.needed, event.available, event.num_blocks, event.num_freed) == (2, 1, 2, 2)
    assert (event.num_tokens, event.num_output_tokens) == (8, 5)
    assert "the next tokens need 2 new blocks, 1 is free" in event.explain()
    bed.drain()
    assert bed.scheduler.num_preemptions == 1
    came_back = [event for event in bed.events("admit") if event.num_output_tokens]
    assert [(event.rid, event.how) for event in came_back] == [("r1", "swap_in" if swap else "prefill")]


def test_two_requests_beyond_the_budget_come_back_in_two_steps_between_decodes() -> None:
    bed = make_paged_bed(block_size=4, max_num_seqs=3, max_num_batched_tokens=4, kv_manager_class=Squeezed)
    for _ in range(3):
        bed.add(1, max_tokens=12)
    for _ in range(6):
        bed.step()
    bed.scheduler.kv_manager.due = 2  # type: ignore[attr-defined]
    bed.step()
    assert bed.preempted() == ["r1", "r2"]
    counts = [bed.step().counts for _ in range(4)]
    assert counts == [{"r1": 7}, {"r0": 1, "r1": 1}, {"r2": 7}, {"r0": 1, "r1": 1, "r2": 1}]
    bed.drain()


# --- requests that cannot run -----------------------------------------------------------------------------------------


@BOTH_MODES
def test_a_request_that_outgrows_the_pool_alone_fails_and_others_go_on(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=2, block_size=4, swap=swap)
    large, waits = bed.add(5, max_tokens=50), bed.add(3, max_tokens=3)
    assert bed.drain(limit=100) == {large: "error", waits: "length"}
    error = bed.requests[large].finish_reason.error  # type: ignore[union-attr]
    assert isinstance(error, KVCapacityError) and len(bed.said(large)) == 4
    assert str(error) == (
        "request 'r0' has grown to 9 tokens, which need 3 blocks of 4 tokens; the KV memory has 2: give it more, or "
        "ask for fewer tokens"
    )


@BOTH_MODES
def test_the_last_request_waits_for_one_that_is_about_to_end_before_it_fails(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=5, block_size=2, max_num_seqs=2, swap=swap, trace=True)
    stays, leaves = bed.add(2, max_tokens=7), bed.add(4, max_tokens=20)
    while len(bed.said(stays)) < 3:
        bed.step()
    assert bed.scheduler.kv_manager.num_free == 0
    bed.abort(leaves)
    step = bed.step()
    assert step.counts == {} and step.ended == {leaves: "abort"}, "its block is still taken: no token, and no error"
    [event] = bed.events("left_out")
    assert (event.rids, event.limit, event.available) == ((stays,), "blocks", 0)
    assert bed.drain() == {leaves: "abort", stays: "length"}
