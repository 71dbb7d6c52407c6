"""The scheduler of blocks by example: requests that join, go on and leave, and the messages about them.

Every step runs on the test-bed: the messages are judged, and an oracle reads every slot of KV that a request uses. What
is asserted here comes on top. Preemption, forks and lost steps have files of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.support.engines import OnEvent
from tests.testbed.bed import Step
from tests.testbed.fakes import make_request
from tests.testbed.paged import make_paged_bed


def starts(step: Step) -> dict[str, int]:
    """The position of each request's first new token."""
    output = step.output
    full = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs + output.scheduled_resumed_reqs}
    cached = output.scheduled_cached_reqs
    return full | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def new_blocks(step: Step) -> dict[str, list[int]]:
    """The blocks that the requests which went on got in addition."""
    cached = step.output.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.new_block_ids, strict=True))


# --- the worked example -----------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    bed = make_paged_bed(max_num_seqs=3, max_num_batched_tokens=64, block_size=4, tensors=True)
    first, second, third = bed.add(9), bed.add(3, max_tokens=2), bed.add(5)

    step = bed.step()
    assert step.counts == {first: 9, second: 3, third: 5} and step.output.total_num_scheduled_tokens == 17
    assert set(starts(step).values()) == {0}
    assert [data.block_ids for data in step.output.scheduled_new_reqs] == [[1, 2, 3], [4], [5, 6]]

    step = bed.step()
    assert step.output.total_num_scheduled_tokens == 3 and starts(step) == {first: 9, second: 3, third: 5}
    assert new_blocks(step) == {first: [], second: [], third: []}, "each has room in its last block"
    assert step.ended == {second: "length"} and bed.running() == [first, third]

    newcomer = bed.add(12)
    step = bed.step()
    assert step.counts == {newcomer: 12, first: 1, third: 1} and step.output.total_num_scheduled_tokens == 14
    assert starts(step) == {newcomer: 0, first: 10, third: 6}
    assert step.output.finished_req_ids == {second}
    assert step.output.scheduled_new_reqs[0].block_ids == [7, 8, 9], "the block that was freed first is given out first"
    assert bed.drain() == {second: "length", first: "length", third: "length", newcomer: "length"}


def test_an_idle_scheduler_schedules_nothing() -> None:
    bed = make_paged_bed(trace=True)
    for _ in range(2):
        assert bed.step().output is None
    assert bed.events() == []


# --- the budget and those who run already -----------------------------------------------------------------------------


def test_a_request_that_the_budget_left_out_runs_before_any_is_admitted() -> None:
    bed = make_paged_bed(max_num_seqs=4, max_num_batched_tokens=4, trace=True)
    old, other = bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3, max_tokens=9), bed.add(4)
    assert bed.step().counts == {"r2": 3, old: 1}, "prompts first, then as many as the budget has left"
    [event] = bed.events("left_out")
    assert (event.rids, event.limit, event.available) == ((other,), "max_num_batched_tokens", 4)
    assert bed.step().counts == {other: 1, old: 1, "r2": 1}, "r3 needs 4, and 3 are left"
    assert bed.step().counts == {"r3": 4}, "no request was left out, so it joins at once"
    assert bed.step().counts == {old: 1, other: 1, "r2": 1, "r3": 1}


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_an_id_can_be_used_again_at_once() -> None:
    bed = make_paged_bed(max_num_seqs=1)
    for length in (3, 5):
        bed.add(length, max_tokens=2, request_id="same")
        for face in (bed.scheduler, bed.families):
            with pytest.raises(DuplicateRequestError, match="'same' is in use"):
                face.add_request(make_request("same", [1], SamplingParams(), request_class=Request))
        while bed.scheduler.requests:
            bed.step()
    assert bed.steps[2].output.finished_req_ids == {"same"} == set(bed.steps[2].joined), "the end came first"
    assert len(bed.steps) == 4


# --- aborts and failures ----------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one() -> None:
    bed = make_paged_bed(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between the two verbs
    for _ in range(3):
        bed.add(3, 2)
    OnEvent(bed.scheduler.tracer, "result", lambda: bed.abort("r2"))
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


# --- what the invariants notice ---------------------------------------------------------------------------------------


SPOILED: dict[str, Callable[[Any], object]] = {
    "a waiting request is lost": lambda bed: bed.scheduler.waiting.pop_request(),
    "a running request is lost": lambda bed: bed.scheduler.running.pop(0),
    "a request is forgotten": lambda bed: bed.scheduler.requests.pop("r0"),
    "a request runs twice": lambda bed: bed.scheduler.running.append(bed.scheduler.running[0]),
    "memory has no owner": lambda bed: bed.scheduler.kv_manager.reserve("another", 1),
    "memory is freed too early": lambda bed: bed.scheduler.kv_manager.release("r0"),
    "a request has too much memory": lambda bed: bed.scheduler.kv_manager.reserve("r0", 9),
    "a token counts twice": lambda bed: setattr(bed.requests["r0"].sequence, "num_computed_tokens", 3),
    "too many run": lambda bed: setattr(bed.scheduler, "max_num_seqs", 1),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_the_invariants_notice(spoil: Callable[[Any], object]) -> None:
    bed = make_paged_bed(max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2), bed.add(2), bed.add(4), bed.add(4)
    bed.step()
    bed.scheduler.check_invariants()
    spoil(bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()


# --- what the bed notices ---------------------------------------------------------------------------------------------


class NeverCopies(KVCacheManager):
    """Lets siblings write into the block that they share."""

    def in_need(self, lengths: Any) -> list[tuple[str, int]]:
        return [one for one in lengths if self.blocks_for(one[1]) > len(self.block_ids(one[0]))]

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        own = len(self.block_ids(request_id)) if request_id in self.owned() else 0
        return super().reserve(request_id, num_tokens) if self.blocks_for(num_tokens) > own else []


def without(name: str) -> type[Scheduler]:
    """A scheduler whose decisions do not say one thing."""

    class Forgets(Scheduler):
        def schedule(self) -> SchedulerOutput:
            output = super().schedule()
            return dataclasses.replace(output, **{name: type(getattr(output, name))()})

    return Forgets


FAULTS: dict[str, dict[str, Any]] = {
    "never copies": {"kv_manager_class": NeverCopies},
    "no copies": {"scheduler_class": without("blocks_to_copy")},
    "no swap out": {"scheduler_class": without("blocks_to_swap_out")},
    "no swap in": {"scheduler_class": without("blocks_to_swap_in")},
    "no resumed requests": {"scheduler_class": without("scheduled_resumed_reqs")},
    "no ends": {"scheduler_class": without("finished_req_ids")},
}


@pytest.mark.parametrize("checked", [True, False], ids=["with checks", "by the KV alone"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_forgets_something_is_noticed(fault: str, checked: bool) -> None:
    bed = make_paged_bed(num_blocks=7, block_size=4, swap=True, checked=checked, **FAULTS[fault])
    bed.add(6, max_tokens=10, n=2), bed.add(6, max_tokens=10)
    if fault == "no ends" and not checked:  # harmless here: the bed removes the runner's state of ended requests
        bed.drain()
        return
    with pytest.raises((AssertionError, KeyError)):
        bed.drain()
