"""The scheduler by example: who joins, who waits for what, who goes first, who leaves, and what the messages say of it.

Every step runs on the test-bed, which checks the messages and the invariants; what is asserted here comes on top.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.kv_manager import SlotManager
from tests.testbed.bed import SchedulerBed, Step, make_bed
from tests.testbed.fakes import answer, make_request


def starts(step: Step) -> list[int]:
    """The start positions of a step's rows."""
    return prepare_inputs_from_scheduler_output(step.output).start_positions


def total(step: Step) -> int:
    return int(step.output.total_num_scheduled_tokens)


class Blocks:
    """Blocks of four tokens, as m3 will have them; a request grows block by block."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, num_blocks: int = 100) -> None:
        self.num_blocks = num_blocks
        self.blocks: dict[str, list[int]] = {}

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        return self._missing(request_id, num_tokens) <= self.num_blocks - sum(map(len, self.blocks.values()))

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        taken = {block for blocks in self.blocks.values() for block in blocks}
        free = [block for block in range(1, self.num_blocks + 1) if block not in taken]
        new = free[: self._missing(request_id, num_tokens)]
        self.blocks[request_id] = self.blocks.get(request_id, []) + new
        return new

    def block_ids(self, request_id: str) -> list[int]:
        return list(self.blocks[request_id])

    def release(self, request_id: str) -> None:
        self.blocks.pop(request_id, None)

    def owned(self) -> dict[str, list[int]]:
        return self.blocks

    def check_invariants(self) -> None:
        taken = [block for blocks in self.blocks.values() for block in blocks]
        assert len(taken) == len(set(taken)) <= self.num_blocks

    def _missing(self, request_id: str, num_tokens: int) -> int:
        return max(0, -(-num_tokens // 4) - len(self.blocks.get(request_id, [])))


# --- the worked example -----------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    bed = make_bed(max_num_seqs=3, max_num_batched_tokens=64)
    first, second, third = bed.add(9), bed.add(3, max_tokens=2), bed.add(5)

    step = bed.step()
    assert (total(step), starts(step)) == (17, [0, 0, 0])
    assert step.joined == [first, second, third]
    assert step.counts == {first: 9, second: 3, third: 5}

    step = bed.step()
    assert (total(step), starts(step)) == (3, [9, 3, 5])
    assert (step.joined, step.ended) == ([], {second: "length"})
    assert bed.running() == [first, third]
    assert bed.scheduler.kv_manager.owned() == {first: [0], third: [2]}

    newcomer = bed.add(12)
    step = bed.step()
    assert (total(step), starts(step)) == (14, [0, 10, 6])
    assert step.counts == {newcomer: 12, first: 1, third: 1}
    assert step.output.finished_req_ids == {second}
    assert step.output.scheduled_new_reqs[0].block_ids == [1], "the slot that became free"

    bed.drain()
    assert len(bed.said(first)) == 4 and len(bed.said(second)) == 2


def test_the_worked_example_in_the_trace() -> None:
    bed = make_bed(max_num_seqs=3, max_num_batched_tokens=64, trace=True)
    bed.add(9), bed.add(3, max_tokens=2), bed.add(5)
    bed.step()
    bed.step()
    bed.add(12)
    bed.step()
    prefill, decode, mixed = bed.events("batch")
    assert (prefill.mode, prefill.rids, prefill.total_tokens) == ("prefill", ("r0", "r1", "r2"), 17)
    assert (prefill.extend_lens, prefill.prefix_lens, prefill.seq_lens) == ((9, 3, 5), (0, 0, 0), (9, 3, 5))
    assert (prefill.joined, prefill.left, prefill.budget) == (("r0", "r1", "r2"), (), 64)
    assert (decode.mode, decode.rids, decode.total_tokens) == ("decode", ("r0", "r1", "r2"), 3)
    assert (decode.extend_lens, decode.prefix_lens, decode.seq_lens) == ((1, 1, 1), (9, 3, 5), (10, 4, 6))
    assert (decode.joined, decode.left) == ((), ())
    assert (mixed.mode, mixed.rids, mixed.total_tokens) == ("mixed", ("r3", "r0", "r2"), 14)
    assert (mixed.extend_lens, mixed.prefix_lens, mixed.seq_lens) == ((12, 1, 1), (0, 10, 6), (12, 11, 7))
    assert (mixed.joined, mixed.left) == (("r3",), ("r1",))
    assert "1 prefill of 12 tokens and 2 decodes of 1 token, 14 of at most 64" in mixed.explain()
    admitted = [(event.rid, event.extend, event.block_ids, event.budget_left) for event in bed.events("admit")]
    assert admitted == [("r0", 9, (0,), 55), ("r1", 3, (1,), 52), ("r2", 5, (2,), 47), ("r3", 12, (1,), 52)]


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_manager_class", [SlotManager, Blocks])
def test_as_many_join_as_may_run(kv_manager_class: type) -> None:
    bed = make_bed(max_num_seqs=2, kv_manager_class=kv_manager_class)
    rids = [bed.add(3, max_tokens=2) for _ in range(5)]
    assert [bed.step().joined for _ in range(6)] == [rids[:2], [], rids[2:4], [], rids[4:], []]
    assert not bed.scheduler.requests


def test_a_slot_that_becomes_free_is_taken_in_the_very_next_step() -> None:
    bed = make_bed(max_num_seqs=2)
    long, short, next_one = bed.add(3, max_tokens=9), bed.add(3, max_tokens=1), bed.add(3)
    assert bed.step().ended == {short: "length"}
    assert bed.step().joined == [next_one]
    assert bed.running() == [long, next_one]


def test_prompts_join_as_far_as_the_budget_reaches() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=10)
    for length in (4, 6, 1, 10):
        bed.add(length, max_tokens=1)
    assert [bed.step().counts for _ in range(3)] == [{"r0": 4, "r1": 6}, {"r2": 1}, {"r3": 10}]


def test_nobody_overtakes_a_prompt_that_does_not_fit() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=10, trace=True)
    bed.add(8)
    large, small = bed.add(5), bed.add(1)
    assert bed.step().joined == ["r0"] and bed.waiting() == [large, small]
    (refusal,) = bed.events("not_admitted")
    assert (refusal.rid, refusal.limit, refusal.needed, refusal.available) == (large, "max_num_batched_tokens", 5, 2)
    assert refusal.num_waiting == 2
    assert f"{large} must wait, and 1 other behind it" in refusal.explain()


def test_the_trace_says_which_limit_keeps_a_request_out() -> None:
    bed = make_bed(max_num_seqs=1, trace=True)
    bed.add(3)
    waits = bed.add(4)
    bed.step()
    (refusal,) = bed.events("not_admitted")
    assert (refusal.rid, refusal.limit, refusal.needed, refusal.available) == (waits, "max_num_seqs", 2, 1)
    assert "max_num_seqs = 1 requests run already" in refusal.explain()
    kinds = [event.kind for event in bed.events()]
    assert kinds == ["request_added", "request_added", "admit", "not_admitted", "batch", "result"]


def test_a_request_in_the_trace_from_its_arrival_to_its_end() -> None:
    bed = make_bed(trace=True)
    bed.add(3, max_tokens=2)
    bed.drain()
    kinds = [event.kind for event in bed.events()]
    assert kinds == ["request_added", "admit", "batch", "result", "batch", "result", "finish"]
    assert [event.out_len for event in bed.events("result")] == [1, 2]


def test_an_idle_scheduler_schedules_nothing() -> None:
    bed = make_bed(trace=True)
    for _ in range(2):
        step = bed.step()
        assert step.output is None and step.changed == []
    assert bed.events() == []


# --- memory behind a protocol -----------------------------------------------------------------------------------------


def test_a_manager_of_blocks_serves_the_same_scheduler() -> None:
    bed = make_bed(max_num_seqs=3, kv_manager_class=Blocks)
    grows = bed.add(3, max_tokens=7)
    for length in (8, 1, 5, 12):
        bed.add(length, max_tokens=9)
    new_blocks = []
    for _ in range(7):
        cached = bed.step().output.scheduled_cached_reqs
        if grows in cached.req_ids:
            new_blocks.append(len(cached.new_block_ids[cached.req_ids.index(grows)]))
    assert new_blocks == [0, 1, 0, 0, 0, 1], "its KV grows from 3 tokens to 9"
    bed.drain()


def test_who_has_no_memory_waits_until_somebody_leaves() -> None:
    bed = make_bed(max_num_seqs=4, kv_manager_class=lambda **limits: Blocks(**limits, num_blocks=5), trace=True)
    bed.add(8, max_tokens=4), bed.add(7, max_tokens=2)
    waits, behind = bed.add(9, max_tokens=2), bed.add(1)
    bed.step()
    bed.step()
    assert bed.waiting() == [waits, behind], "nobody overtakes here either"
    assert bed.step().joined == [] and bed.running() == ["r0"]
    bed.drain()
    refusals = {(event.rid, event.limit, event.needed) for event in bed.events("not_admitted")}
    assert refusals == {(waits, "kv_memory", 9)}


# --- the budget and those who run already -----------------------------------------------------------------------------


def test_whom_the_budget_left_out_runs_before_anybody_is_admitted() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4, trace=True)
    old, other = bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3, max_tokens=9), bed.add(4)
    assert bed.step().counts == {"r2": 3, old: 1}, "prompts first, then as many as the budget has left"
    (left_out,) = bed.events("left_out")
    assert (left_out.rids, left_out.available) == ((other,), 4)
    assert other in left_out.explain()
    assert bed.step().counts == {other: 1, old: 1, "r2": 1}, "r3 needs 4, and 3 are left"
    assert bed.step().counts == {"r3": 4}, "nobody was left out, so it joins at once"
    assert bed.step().counts == {old: 1, other: 1, "r2": 1, "r3": 1}


def test_prompts_that_keep_coming_starve_no_decode() -> None:
    bed = make_bed(max_num_seqs=5, max_num_batched_tokens=8)
    decodes = [bed.add(2, max_tokens=100) for _ in range(4)]
    bed.step()
    for _ in range(60):
        bed.add(8, max_tokens=1)
        bed.step()
    for rid in decodes:
        ran = [rid in step.counts for step in bed.steps]
        assert all(now or then for now, then in pairwise(ran)), "no decode misses two steps in a row"
    joined = [bool(step.joined) for step in bed.steps[1:]]
    assert all(now or then for now, then in pairwise(joined)), "and the prompts are not starved either"


def test_decodes_that_use_up_the_budget_keep_no_prompt_out_for_ever() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    for _ in range(3):
        bed.add(1, max_tokens=100)
    bed.step()
    whole = bed.add(4)
    assert bed.step().joined == [whole]


def test_the_counts_are_in_the_order_of_the_batch() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3), bed.add(2)
    assert bed.step().counts == {"r2": 3, "r0": 1}
    step = bed.step()
    assert step.counts == {"r3": 2, "r1": 1, "r0": 1}, "r1 went first: it was left out"
    assert list(step.counts) == prepare_inputs_from_scheduler_output(step.output).req_ids


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_request_of_one_token_ends_in_its_prefill() -> None:
    bed = make_bed(max_num_seqs=1)
    rids = [bed.add(3, max_tokens=1) for _ in range(3)]
    assert [bed.step().ended for _ in rids] == [{rid: "length"} for rid in rids]
    assert all(bed.said(rid) == answer(bed.requests[rid].prompt_token_ids, 1) for rid in rids)


def test_a_stop_token_and_the_model_length_end_a_request_too() -> None:
    bed = make_bed(max_model_len=20)
    prompt = [1, 2, 3]
    stop = answer(prompt, 9)[4]
    stops, at_the_end = bed.add(prompt, 50, stop_token_ids=[stop]), bed.add(15, max_tokens=50)
    assert bed.drain() == {stops: "stop", at_the_end: "length"}
    assert bed.said(stops) == answer(prompt, 5)
    assert len(bed.said(at_the_end)) == 5


def test_the_update_names_who_changed_in_the_order_of_admission() -> None:
    bed = make_bed(max_num_seqs=3)
    for max_tokens in (1, 3, 2, 9):
        bed.add(3, max_tokens)
    assert [bed.step().changed for _ in range(3)] == [["r0", "r1", "r2"], ["r1", "r2", "r3"], ["r1", "r3"]]


def test_memory_is_free_in_the_same_step_for_the_last_ones_too() -> None:
    bed = make_bed()
    bed.add(3, max_tokens=2), bed.add(4, max_tokens=2)
    bed.step()
    assert set(bed.scheduler.kv_manager.owned()) == {"r0", "r1"}
    bed.step()
    assert not bed.scheduler.kv_manager.owned() and not bed.scheduler.requests


def test_every_end_is_announced_once_in_the_next_decision() -> None:
    bed = make_bed(max_num_seqs=2)
    bed.add(3, max_tokens=1), bed.add(3, max_tokens=2), bed.add(3, max_tokens=1)
    announced = [bed.step().output.finished_req_ids for _ in range(2)]
    assert announced == [set(), {"r0"}] and bed.step().output is None, "there is nothing to compute"
    bed.add(3)
    assert [bed.step().output.finished_req_ids for _ in range(2)] == [{"r1", "r2"}, set()]


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    bed = make_bed(max_num_seqs=1)
    for length in (3, 5):
        bed.add(length, max_tokens=2, request_id="same")
        with pytest.raises(DuplicateRequestError, match="'same' is in use"):
            bed.scheduler.add_request(make_request("same", [1], SamplingParams()))
        bed.drain()
        assert bed.said("same") == answer(bed.requests["same"].prompt_token_ids, 2)
    assert len(bed.steps) == 4
    assert bed.steps[2].output.finished_req_ids == {"same"} == set(bed.steps[2].joined), "the end came first"


def test_a_refused_arrival_changes_nothing() -> None:
    bed = make_bed(trace=True)
    bed.add(3, request_id="same")
    with pytest.raises(DuplicateRequestError):
        bed.scheduler.add_request(make_request("same", [1], SamplingParams()))
    assert bed.waiting() == ["same"] and len(bed.events()) == 1
    bed.drain()


def test_500_requests_go_through_4_slots() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=48)
    for number in range(500):
        bed.add(1 + number * 7 % 40, max_tokens=1 + number * 5 % 13)
    ended = bed.drain()
    assert set(ended.values()) == {"length"} and len(ended) == 500
    assert [rid for step in bed.steps for rid in step.joined] == list(bed.requests), "first come, first served"
    slots = {block for step in bed.steps for data in step.output.scheduled_new_reqs for block in data.block_ids}
    assert slots == {0, 1, 2, 3}


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["r2", "r3", "r4"], ids=["first in line", "in the middle", "last in line"])
def test_an_abort_while_waiting(victim: str) -> None:
    bed = make_bed(max_num_seqs=2)
    for _ in range(5):
        bed.add(3, max_tokens=2)
    bed.step()
    assert bed.abort(victim) == [victim]
    assert bed.waiting() == ["r2", "r3", "r4"], "an abort only marks"
    assert bed.step().ended == {"r0": "length", "r1": "length", victim: "abort"}
    assert bed.said(victim) == ()
    bed.drain()
    assert [rid for step in bed.steps for rid in step.joined] == [r for r in bed.requests if r != victim]


def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one() -> None:
    bed = make_bed(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between schedule and update
    for _ in range(3):
        bed.add(3, 2)

    class AbortsTheLast:
        def read(self, record: Any) -> None:
            if record.event.kind == "result":
                bed.abort("r2")

        def close(self) -> None:
            """Nothing to close."""

    bed.scheduler.tracer.attach(AbortsTheLast())
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


def test_an_abort_of_the_first_in_line_lets_the_next_join_at_once() -> None:
    bed = make_bed(max_num_seqs=2, max_num_batched_tokens=6)
    bed.add(2), bed.add(6), bed.add(3)
    bed.abort("r1")
    assert bed.step().joined == ["r0", "r2"]


def test_an_abort_while_decoding() -> None:
    bed = make_bed(max_num_seqs=2)
    victim, mate = bed.add(3, max_tokens=9), bed.add(3, max_tokens=9)
    bed.step()
    bed.step()
    assert bed.abort(victim) == [victim]
    step = bed.step()
    assert step.counts == {mate: 1} and step.ended == {victim: "abort"}
    assert len(bed.said(victim)) == 2
    assert bed.drain() == {victim: "abort", mate: "length"}


@pytest.mark.parametrize("num_steps", [0, 2], ids=["in prefill", "in decode"])
def test_an_abort_while_the_step_runs_drops_the_token_of_the_step(num_steps: int) -> None:
    bed = make_bed(max_num_seqs=2)
    victim, mate = bed.add(3, max_tokens=9), bed.add(3, max_tokens=9)
    for _ in range(num_steps):
        bed.step()
    step = bed.step(between=lambda output: bed.abort(victim))
    assert step.counts.keys() == {victim, mate} and step.ended == {victim: "abort"}
    assert len(bed.said(victim)) == num_steps
    bed.drain()
    assert len(bed.said(mate)) == 9


def test_an_abort_of_one_whom_the_budget_has_just_left_out() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(2, max_tokens=9)
    victim = bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3)
    step = bed.step(between=lambda output: bed.abort(victim))
    assert victim not in step.counts and step.ended == {victim: "abort"}
    bed.drain()


def test_an_abort_is_accepted_once_and_only_for_who_is_there() -> None:
    bed = make_bed()
    bed.add(3, max_tokens=1)
    assert bed.abort("nobody") == []
    assert bed.abort("r0", "r0") == ["r0"]
    assert bed.abort("r0") == []
    assert bed.step().ended == {"r0": "abort"}
    assert bed.abort("r0") == []


def test_the_first_reason_stands() -> None:
    bed = make_bed()
    aborted, failed = bed.add(3), bed.add(3)
    bed.abort(aborted)
    bed.fail([failed], ValueError("first"))
    assert bed.fail([aborted], ValueError("late")) == [] == bed.abort(failed)
    assert bed.step().ended == {aborted: "abort", failed: "error"}


def test_a_step_without_work_still_ends_who_was_aborted() -> None:
    bed = make_bed()
    bed.add(3), bed.add(3)
    bed.step()
    bed.add(3)
    bed.abort("r0", "r1", "r2")
    step = bed.step()
    assert step.output is None and step.ended == dict.fromkeys(["r0", "r1", "r2"], "abort")
    assert bed.drain() == step.ended


def test_abort_in_the_trace() -> None:
    bed = make_bed(max_num_seqs=1, trace=True)
    bed.add(3), bed.add(3)
    bed.step()
    bed.abort("r0", "r1")
    assert [(event.rid, event.state) for event in bed.events("abort")] == [("r0", "running"), ("r1", "waiting")]
    bed.step()
    assert [(event.rid, event.reason) for event in bed.events("finish")] == [("r0", "abort"), ("r1", "abort")]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_model_that_raises_fails_the_requests_of_its_step_and_no_other() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3), bed.add(4)
    step = bed.step(crash=True)
    assert step.counts == {"r2": 3, "r0": 1} and step.ended == {"r0": "error", "r2": "error"}
    assert bed.running() == ["r1"] and bed.waiting() == ["r3"]
    assert bed.drain() == {"r0": "error", "r2": "error", "r3": "length", "r1": "length"}


@pytest.mark.parametrize("num_steps", [0, 1], ids=["in prefill", "in decode"])
def test_a_row_that_cannot_be_used_fails_its_own_request(num_steps: int) -> None:
    bed = make_bed()
    bed.add(3), bed.add(3)
    for _ in range(num_steps):
        bed.step()
    assert bed.step(failing=["r0"]).ended == {"r0": "error"}
    assert bed.drain() == {"r0": "error", "r1": "length"}


def test_a_lost_device_ends_everybody_in_the_same_update() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3), bed.add(4)
    step = bed.step(between=lambda output: bed.fail(list(bed.scheduler.requests), RuntimeError("gone")))
    assert step.ended == dict.fromkeys(["r0", "r1", "r2", "r3"], "error"), "running, left out, joining, waiting"
    assert bed.drain() == step.ended


# --- what the invariants notice ---------------------------------------------------------------------------------------


def lose_a_waiting_request(bed: SchedulerBed) -> None:
    bed.scheduler.waiting.pop_request()


def lose_a_running_request(bed: SchedulerBed) -> None:
    del bed.scheduler.running[0]


def forget_a_request(bed: SchedulerBed) -> None:
    del bed.scheduler.requests["r0"]


def run_twice(bed: SchedulerBed) -> None:
    bed.scheduler.running.append(bed.scheduler.running[0])


def keep_memory(bed: SchedulerBed) -> None:
    bed.scheduler.kv_manager.reserve("somebody else", 1)


def free_too_early(bed: SchedulerBed) -> None:
    bed.scheduler.kv_manager.release("r0")


def count_a_token_twice(bed: SchedulerBed) -> None:
    bed.requests["r0"].sequence.num_computed_tokens += 1


def let_too_many_run(bed: SchedulerBed) -> None:
    bed.scheduler.max_num_seqs = 1


def break_the_memory(bed: SchedulerBed) -> None:
    assert isinstance(bed.scheduler.kv_manager, SlotManager)
    bed.scheduler.kv_manager.num_slots = 1


@pytest.mark.parametrize(
    "fault",
    [
        lose_a_waiting_request,
        lose_a_running_request,
        forget_a_request,
        run_twice,
        keep_memory,
        free_too_early,
        count_a_token_twice,
        let_too_many_run,
        break_the_memory,
    ],
    ids=lambda fault: fault.__name__,
)
def test_the_invariants_notice(fault: Callable[[Any], None]) -> None:
    bed = make_bed(max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2), bed.add(2), bed.add(4), bed.add(4)
    bed.step()
    bed.scheduler.check_invariants()
    fault(bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()
