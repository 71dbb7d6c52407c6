"""Preemption: who has to go, what becomes of its KV, when it comes back, and that no answer shows it."""

import itertools
from collections.abc import Sequence
from typing import Any

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
def test_the_victim_is_who_loses_least(lens: Sequence[tuple[int, int]], victim: int) -> None:
    requests = running(*lens)
    for order in itertools.permutations(requests):
        assert FewestOutputsFirst().choose_victim(order) is requests[victim], "whatever the order of admission"


# --- what becomes of it -----------------------------------------------------------------------------------------------


@BOTH_MODES
def test_a_victim_loses_its_blocks_and_keeps_what_it_said(swap: bool) -> None:
    bed = crowd(swap=swap)
    step = step_until_preempted(bed)
    assert bed.preempted() == ["r1"] == bed.waiting() and bed.running() == ["r0"]
    assert step.counts == {"r0": 1} and len(bed.said("r1")) == 5
    kv_manager = bed.scheduler.kv_manager
    assert kv_manager.owned().keys() == {"r0"}
    assert kv_manager.swapped().keys() == ({"r1"} if swap else set())
    assert len(step.output.blocks_to_swap_out) == (2 if swap else 0)
    said = bed.said("r1")
    bed.drain()
    assert bed.said("r1")[: len(said)] == said and len(bed.said("r1")) == 8


def test_a_recomputed_request_comes_back_with_all_its_tokens() -> None:
    bed = crowd(swap=False)
    step_until_preempted(bed)
    said = list(bed.said("r1"))
    while bed.preempted():
        step = bed.step()
    (resumed,) = step.output.scheduled_resumed_reqs
    assert (resumed.req_id, resumed.output_token_ids, resumed.num_computed_tokens) == ("r1", said, 0)
    assert step.counts["r1"] == 4 + len(said)
    assert step.output.blocks_to_swap_in == []


def test_a_swapped_request_comes_back_with_its_kv() -> None:
    bed = crowd(swap=True)
    out = step_until_preempted(bed).output.blocks_to_swap_out
    while bed.preempted():
        step = bed.step()
    (resumed,) = step.output.scheduled_resumed_reqs
    assert (resumed.req_id, resumed.num_computed_tokens) == ("r1", 8) and step.counts["r1"] == 1
    assert [host for host, _ in step.output.blocks_to_swap_in] == [host for _, host in out]
    bed.drain()
    assert bed.runner.num_written == 2 * (4 + 8 - 1), "nothing is computed twice"


def test_without_host_blocks_a_victim_is_recomputed() -> None:
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=True, num_host_blocks=1, trace=True)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    step = step_until_preempted(bed)
    assert step.output.blocks_to_swap_out == [] and not bed.scheduler.kv_manager.swapped()
    assert [event.mode for event in bed.events("preempted")] == ["recompute"]
    assert set(bed.drain().values()) == {"length"}


@BOTH_MODES
def test_the_trace_says_why(swap: bool) -> None:
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


def test_a_mate_that_fails_in_the_same_step_does_not_confuse_the_count_of_a_recomputed_one() -> None:
    """One comes back, one fails: as many results as there are requests that merely go on."""
    bed = make_paged_bed(block_size=4, max_num_seqs=4, kv_manager_class=Squeezed)
    bed.add(4, max_tokens=9), bed.add(4, max_tokens=9), bed.add(4, max_tokens=9)
    bed.step()
    bed.step()
    bed.scheduler.kv_manager.due = 1  # type: ignore[attr-defined]
    bed.step()
    step = bed.step(failing=["r0"])
    assert step.counts == {"r2": 6, "r1": 1, "r0": 1} and step.ended == {"r0": "error"}
    assert set(bed.drain().values()) == {"error", "length"}


# --- who comes back when ----------------------------------------------------------------------------------------------


@BOTH_MODES
def test_whoever_was_preempted_goes_before_all_others_oldest_first(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=6, block_size=2, max_num_seqs=6, swap=swap)
    for _ in range(4):
        bed.add(2, max_tokens=9)
    came: list[str] = []
    for _ in range(200):
        if not bed.scheduler.requests:
            break
        before = bed.waiting()
        preempted = bed.preempted()
        assert before[: len(preempted)] == preempted == sorted(preempted)
        step = bed.step()
        came += [rid for rid in before if rid in step.counts]
    assert bed.scheduler.num_preemptions > 2
    assert set(bed.ended.values()) == {"length"}
    assert list(dict.fromkeys(came)) == ["r0", "r1", "r2", "r3"]


@BOTH_MODES
def test_nobody_is_admitted_in_a_step_that_preempted(swap: bool) -> None:
    bed = crowd(swap=swap)
    for _ in range(5):
        bed.step()
    newcomer = bed.add(1, max_tokens=1)
    step = bed.step()
    assert bed.preempted() == ["r1"] and step.joined == [] and newcomer in bed.waiting()
    assert bed.scheduler.kv_manager.num_free == 2, "there would have been room"
    bed.drain()


def test_a_resumed_request_alone_may_exceed_the_token_budget() -> None:
    bed = crowd(swap=False, max_num_seqs=3, max_num_batched_tokens=5)
    step_until_preempted(bed)
    mate = bed.add(3, max_tokens=2)
    step = bed.step()
    while "r1" not in step.counts:
        step = bed.step()
    assert step.counts == {"r1": 9} and mate in bed.waiting(), "alone, and whoever is behind it waits"
    assert set(bed.drain().values()) == {"length"}


def test_two_beyond_the_budget_come_back_in_two_steps_and_whoever_runs_is_not_starved() -> None:
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


def test_whoever_exceeds_the_budget_is_alone_in_its_step() -> None:
    bed = make_paged_bed(num_blocks=12, block_size=2, max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2, max_tokens=12), bed.add(2, max_tokens=12), bed.add(2, max_tokens=12)
    assert set(bed.drain().values()) == {"length"}
    over = [step for step in bed.steps if step.output.total_num_scheduled_tokens > 4]
    assert over and all(len(step.counts) == 1 and step.output.scheduled_resumed_reqs for step in over)


@BOTH_MODES
def test_preempted_requests_may_be_more_than_those_that_run(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=8, block_size=1, max_num_seqs=4, swap=swap)
    for _ in range(6):
        bed.add(1, max_tokens=7)
    assert set(bed.drain().values()) == {"length"}
    assert bed.scheduler.num_preemptions >= 3


# --- no answer shows it -----------------------------------------------------------------------------------------------


@BOTH_MODES
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_answers_with_forced_preemptions_are_those_without(block_size: int, swap: bool) -> None:
    bed = make_paged_bed(block_size=block_size, max_num_seqs=3, swap=swap, tensors=True, kv_manager_class=Squeezed)
    kv_manager: Any = bed.scheduler.kv_manager
    for number in range(5):
        bed.add(1 + 3 * number % 7, max_tokens=6 + number, n=1 + number % 2)
    while bed.scheduler.requests and len(bed.steps) < 200:
        kv_manager.due = int(len(bed.steps) % 3 == 2)
        bed.step()
    assert kv_manager.num_forced == bed.scheduler.num_preemptions > 3
    assert len(bed.drain()) == 7 and set(bed.ended.values()) == {"length"}


@BOTH_MODES
@pytest.mark.parametrize("which", ["preempted", "resumed in this step"])
def test_an_abort_of_a_preempted_request_frees_everything(swap: bool, which: str) -> None:
    bed = crowd(swap=swap)
    step_until_preempted(bed)
    if which == "preempted":
        bed.abort("r1")
        assert bed.step().ended == {"r1": "abort"}
    else:
        while bed.preempted():
            step = bed.step(between=lambda output: "r1" in output.num_scheduled_tokens and bed.abort("r1"))
        assert step.ended.get("r1") == "abort"
    assert not bed.scheduler.kv_manager.swapped()
    assert bed.drain()["r1"] == "abort" and len(bed.said("r1")) == 5
    assert bed.reported_ends.count("r1") == 1


# --- who cannot be helped ---------------------------------------------------------------------------------------------


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


def test_a_pool_of_one_block_serves_what_fits_into_it() -> None:
    bed = make_paged_bed(num_blocks=1, block_size=4)
    fits, grows, next_one = bed.add(2, max_tokens=3), bed.add(2, max_tokens=4), bed.add(4, max_tokens=1)
    assert bed.drain(limit=50) == {fits: "length", grows: "error", next_one: "length"}
    assert [len(bed.said(rid)) for rid in (fits, grows, next_one)] == [3, 3, 1]


@BOTH_MODES
def test_of_two_that_grow_without_end_each_fills_the_pool_before_it_fails(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=4, block_size=2, max_num_seqs=2, swap=swap)
    bed.add(2, max_tokens=20), bed.add(2, max_tokens=20)
    ended = bed.drain(limit=200)
    assert ended == {"r0": "error", "r1": "error"}
    assert [len(bed.said(rid)) for rid in ("r0", "r1")] == [7, 7], "prompt and output but for the newest token"


def test_a_prompt_over_the_pool_that_intake_let_pass_fails_alone() -> None:
    bed = make_paged_bed(num_blocks=2, block_size=4)
    before, too_long, after = bed.add(3), bed.add(9), bed.add(3)
    assert bed.drain(limit=50) == {too_long: "error", before: "length", after: "length"}


@BOTH_MODES
def test_the_last_one_waits_for_whoever_is_about_to_end_before_it_gives_up(swap: bool) -> None:
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


# --- steps that fail --------------------------------------------------------------------------------------------------


def swapping_bed(*, checked: bool = False) -> PagedBed:
    """A bed before a step in which everything but a preemption happens.

    family/0 decodes, `ends` decodes for the last time; family/1 comes back from host memory, family/2 starts on the
    blocks of a sibling and copies one, the twins join, one of them on the other's prompt; `waits` waits.
    """
    bed = make_paged_bed(block_size=4, max_num_seqs=6, swap=True, checked=checked, kv_manager_class=Squeezed)
    for number in range(3):
        bed.add(2, max_tokens=3, request_id=f"first-{number}")
    bed.add(2, max_tokens=4, request_id="ends")
    bed.add(6, max_tokens=9, n=3, request_id="family")
    bed.step()
    bed.step()
    bed.add(5, max_tokens=3, n=2, request_id="twins"), bed.add(3, max_tokens=2, request_id="waits")
    bed.scheduler.kv_manager.due = 1  # type: ignore[attr-defined]
    bed.step()
    assert bed.preempted() == ["family/1"] and bed.running() == ["ends", "family/0"]
    return bed


def test_a_step_that_failed_with_blocks_on_their_way() -> None:
    """Nobody knows whether they were moved. Who was in the step fails; who was swapped out in it starts over."""
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=True)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    for _ in range(5):
        bed.step()
    step = bed.step(crash=True)
    assert step.output.blocks_to_swap_out and step.ended == {"r0": "error"}
    assert not bed.scheduler.kv_manager.swapped() and bed.preempted() == ["r1"]
    step = bed.step()
    assert step.output.scheduled_resumed_reqs[0].num_computed_tokens == 0
    assert bed.drain() == {"r0": "error", "r1": "length"}


def test_a_failed_step_with_a_swap_in_and_forks() -> None:
    bed = swapping_bed(checked=True)
    step = bed.step(crash=True)
    assert set(step.ended.values()) == {"error"} and step.ended.keys() == step.counts.keys()
    bed.drain()
