"""The scheduler of blocks by example: who joins, who goes on, who leaves, and what the messages say of it.

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
from tests.testbed.fakes import answer, make_request
from tests.testbed.paged import PagedBed, make_paged_bed


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
    assert step.output.scheduled_new_reqs[0].block_ids == [7, 8, 9], "whoever was freed first is given out first"
    assert bed.drain() == {second: "length", first: "length", third: "length", newcomer: "length"}


def test_blocks_come_one_by_one_as_a_request_grows() -> None:
    bed = make_paged_bed(block_size=4)
    rid = bed.add(3, max_tokens=8)
    bed.step()
    assert [new_blocks(bed.step())[rid] for _ in range(7)] == [[], [2], [], [], [], [3], []]
    assert starts(bed.steps[2]) == {rid: 4} and not bed.scheduler.requests


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 128])
def test_answers_do_not_depend_on_the_block_size(block_size: int) -> None:
    bed = make_paged_bed(block_size=block_size, num_blocks=256, tensors=True)
    for length in (1, 2, 3, 4, 5, 15, 16, 17, 40):
        bed.add(length, max_tokens=20)
    assert set(bed.drain().values()) == {"length"}
    assert all(len(bed.said(rid)) == 20 for rid in bed.requests)


def test_the_trace_tells_blocks_and_batches() -> None:
    bed = make_paged_bed(block_size=4, num_blocks=8, trace=True)
    bed.add(5, max_tokens=2), bed.add(4, max_tokens=1)
    bed.drain()
    admitted = [(event.rid, event.how, event.extend, event.num_blocks, event.num_free) for event in bed.events("admit")]
    assert admitted == [("r0", "prefill", 5, 2, 6), ("r1", "prefill", 4, 1, 5)]
    batches = [(event.mode, event.rids, event.joined, event.left) for event in bed.events("batch")]
    assert batches == [("prefill", ("r0", "r1"), ("r0", "r1"), ()), ("decode", ("r0",), (), ("r1",))]
    assert "takes 2 free blocks, 6 are left" in bed.events("admit")[0].explain()


def test_an_idle_scheduler_schedules_nothing() -> None:
    bed = make_paged_bed(trace=True)
    for _ in range(2):
        assert bed.step().output is None
    assert bed.events() == []


def test_ten_times_more_requests_run_than_dense_slots_would_allow() -> None:
    bed = make_paged_bed(max_model_len=200, num_blocks=100, block_size=4, max_num_seqs=64)  # two slots of 200 tokens
    for _ in range(30):
        bed.add(6, max_tokens=6)
    bed.step()
    assert len(bed.running()) == 30 > 10 * (400 // 200)
    bed.drain()
    assert bed.scheduler.num_preemptions == 0


# --- the budget and those who run already -----------------------------------------------------------------------------


def test_whom_the_budget_left_out_runs_before_anybody_is_admitted() -> None:
    bed = make_paged_bed(max_num_seqs=4, max_num_batched_tokens=4, trace=True)
    old, other = bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3, max_tokens=9), bed.add(4)
    assert bed.step().counts == {"r2": 3, old: 1}, "prompts first, then as many as the budget has left"
    [event] = bed.events("left_out")
    assert (event.rids, event.limit, event.available) == ((other,), "max_num_batched_tokens", 4)
    assert bed.step().counts == {other: 1, old: 1, "r2": 1}, "r3 needs 4, and 3 are left"
    assert bed.step().counts == {"r3": 4}, "nobody was left out, so it joins at once"
    assert bed.step().counts == {old: 1, other: 1, "r2": 1, "r3": 1}


def test_whoever_is_left_out_may_need_a_block_next_time_and_gets_it() -> None:
    bed = make_paged_bed(max_num_seqs=4, max_num_batched_tokens=4, block_size=2)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3)
    bed.step()
    step = bed.step()
    assert starts(step)["r1"] == 2 and new_blocks(step)["r1"] == [6], "two steps after its prompt"
    bed.drain()


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_every_way_to_end_gives_the_blocks_back_in_the_same_step() -> None:
    bed = make_paged_bed(max_model_len=20, num_blocks=30)
    prompt = [1, 2, 3]
    stops = bed.add(prompt, 50, stop_token_ids=[answer(prompt, 9)[4]])
    at_the_end, at_once = bed.add(15, max_tokens=50), bed.add(15, max_tokens=1)
    assert bed.drain() == {at_once: "length", stops: "stop", at_the_end: "length"}
    assert (len(bed.said(stops)), len(bed.said(at_the_end))) == (5, 5)
    for step, next_step in zip(bed.steps, bed.steps[1:], strict=False):
        assert next_step.output.finished_req_ids == step.ended.keys(), "announced once, in the next decision"
    assert bed.scheduler.kv_manager.num_free == 30


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


def test_500_requests_go_through_a_small_pool() -> None:
    bed = make_paged_bed(max_num_seqs=8, max_num_batched_tokens=48, num_blocks=24, block_size=4)
    for number in range(500):
        bed.add(1 + number * 7 % 40, max_tokens=1 + number * 5 % 13)
    ended = bed.drain()
    assert set(ended.values()) == {"length"} and len(ended) == 500
    assert [rid for step in bed.steps for rid in step.joined] == list(bed.requests), "first come, first served"
    assert bed.scheduler.num_preemptions > 0


# --- aborts and failures ----------------------------------------------------------------------------------------------


def test_an_abort_while_waiting_decoding_and_in_a_step() -> None:
    bed = make_paged_bed(max_num_seqs=2)
    for _ in range(4):
        bed.add(6, max_tokens=5)
    bed.step()
    assert bed.abort("r0", "r3", "nobody", "r0") == ["r0", "r3"]
    step = bed.step(between=lambda output: bed.abort("r1"))
    assert step.counts == {"r1": 1} and step.ended == {"r0": "abort", "r1": "abort", "r3": "abort"}
    assert bed.drain() == step.ended | {"r2": "length"}


def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one() -> None:
    bed = make_paged_bed(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between the two verbs
    for _ in range(3):
        bed.add(3, 2)
    OnEvent(bed.scheduler.tracer, "result", lambda: bed.abort("r2"))
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


def test_memory_is_kept_until_the_update_of_the_step_that_ends_it() -> None:
    bed = make_paged_bed(num_blocks=4, max_num_seqs=3)
    bed.add(8, max_tokens=5)
    waits = bed.add(9, max_tokens=3)
    bed.step()
    bed.abort("r0")
    assert bed.step().joined == [], "the blocks of r0 are free with the update of this step"
    assert bed.step().joined == [waits]
    bed.drain()


def test_a_model_that_raises_fails_the_requests_of_its_step_and_no_other() -> None:
    bed = make_paged_bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3), bed.add(4)
    step = bed.step(crash=True)
    assert step.counts == {"r2": 3, "r0": 1} and step.ended == {"r0": "error", "r2": "error"}
    assert bed.running() == ["r1"] and bed.waiting() == ["r3"]
    assert bed.drain() == {"r0": "error", "r2": "error", "r3": "length", "r1": "length"}


def test_a_row_that_cannot_be_used_fails_its_own_request() -> None:
    bed = make_paged_bed()
    bed.add(3), bed.add(3), bed.add(3)
    assert bed.step(failing=["r0"]).ended == {"r0": "error"}
    assert bed.step(failing=["r2"]).ended == {"r2": "error"}
    assert bed.drain() == {"r0": "error", "r2": "error", "r1": "length"}


# --- what the invariants notice ---------------------------------------------------------------------------------------


def lose_a_waiting_request(bed: PagedBed) -> None:
    bed.scheduler.waiting.pop_request()


def lose_a_running_request(bed: PagedBed) -> None:
    del bed.scheduler.running[0]


def forget_a_request(bed: PagedBed) -> None:
    del bed.scheduler.requests["r0"]


def run_twice(bed: PagedBed) -> None:
    bed.scheduler.running.append(bed.scheduler.running[0])


def keep_memory(bed: PagedBed) -> None:
    bed.scheduler.kv_manager.reserve("somebody else", 1)


def free_too_early(bed: PagedBed) -> None:
    bed.scheduler.kv_manager.release("r0")


def give_too_much(bed: PagedBed) -> None:
    bed.scheduler.kv_manager.reserve("r0", 9)


def count_a_token_twice(bed: PagedBed) -> None:
    bed.requests["r0"].sequence.num_computed_tokens += 1


def let_too_many_run(bed: PagedBed) -> None:
    bed.scheduler.max_num_seqs = 1


@pytest.mark.parametrize(
    "fault",
    [
        lose_a_waiting_request,
        lose_a_running_request,
        forget_a_request,
        run_twice,
        keep_memory,
        free_too_early,
        give_too_much,
        count_a_token_twice,
        let_too_many_run,
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_invariants_notice(fault: Callable[[Any], None]) -> None:
    bed = make_paged_bed(max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2), bed.add(2), bed.add(4), bed.add(4)
    bed.step()
    bed.scheduler.check_invariants()
    fault(bed)
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
    "nobody resumes": {"scheduler_class": without("scheduled_resumed_reqs")},
    "no ends": {"scheduler_class": without("finished_req_ids")},
}


@pytest.mark.parametrize("checked", [True, False], ids=["with checks", "by the KV alone"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_forgets_something_is_noticed(fault: str, checked: bool) -> None:
    bed = make_paged_bed(num_blocks=7, block_size=4, swap=True, checked=checked, **FAULTS[fault])
    bed.add(6, max_tokens=10, n=2), bed.add(6, max_tokens=10)
    if fault == "no ends" and not checked:  # harmless here: the bed makes the runner forget whoever has ended
        bed.drain()
        return
    with pytest.raises((AssertionError, KeyError)):
        bed.drain()
