"""The scheduler by example: a batch that requests join and leave, memory that is short, aborts, broken invariants.

Every step runs on the test-bed, which checks the messages and the invariants; what is asserted here comes on top. That
every decision follows the rules, whatever comes when, is tested in `test_scheduler_properties.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.kv_manager import SlotManager
from tests.support.engines import OnEvent
from tests.support.traces import fields
from tests.testbed.bed import SchedulerBed, make_bed
from tests.testbed.fakes import answer, make_request


def test_requests_join_and_leave_a_running_batch() -> None:
    """Prompts of 9, 3 and 5 tokens; the second ends after two tokens, and one of 12 takes its place."""
    bed = make_bed(max_num_seqs=3, max_num_batched_tokens=64, trace=True)
    bed.add(9, max_tokens=9), bed.add(3, max_tokens=2), bed.add(5, max_tokens=9)
    steps = [bed.step(), bed.step()]
    assert steps[1].ended == {"r1": "length"}
    assert bed.scheduler.kv_manager.owned() == {"r0": [0], "r2": [2]}
    bed.add(12)
    steps.append(bed.step())
    assert [prepare_inputs_from_scheduler_output(step.output).start_positions for step in steps] == [
        [0, 0, 0],
        [9, 3, 5],
        [0, 10, 6],
    ]
    assert [step.changed for step in steps] == [["r0", "r1", "r2"], ["r0", "r1", "r2"], ["r0", "r2", "r3"]]
    batches = bed.events("batch")
    assert fields(batches, "mode", "rids", "total_tokens", "extend_lens", "prefix_lens", "seq_lens") == [
        ("prefill", ("r0", "r1", "r2"), 17, (9, 3, 5), (0, 0, 0), (9, 3, 5)),
        ("decode", ("r0", "r1", "r2"), 3, (1, 1, 1), (9, 3, 5), (10, 4, 6)),
        ("mixed", ("r3", "r0", "r2"), 14, (12, 1, 1), (0, 10, 6), (12, 11, 7)),
    ]
    assert fields(batches, "joined", "left", "budget") == [
        (("r0", "r1", "r2"), (), 64),
        ((), (), 64),
        (("r3",), ("r1",), 64),
    ]
    assert "1 prefill of 12 tokens and 2 decodes of 1 token, 14 of at most 64" in batches[2].explain()
    admitted = bed.events("admit")
    assert fields(admitted, "rid", "extend", "block_ids", "budget_left", "num_running", "num_waiting") == [
        ("r0", 9, (0,), 55, 1, 2),
        ("r1", 3, (1,), 52, 2, 1),
        ("r2", 5, (2,), 47, 3, 0),
        ("r3", 12, (1,), 52, 3, 0),
    ]
    assert set(fields(admitted, "max_num_seqs", "max_num_batched_tokens", "prefix")) == {(3, 64, 0)}
    bed.drain()


def test_an_idle_scheduler_schedules_nothing() -> None:
    bed = make_bed(trace=True)
    step = bed.step()
    assert step.output is None and step.changed == [] and bed.events() == []


def test_running_requests_that_the_budget_left_out_go_first_in_the_next_step() -> None:
    bed = make_bed(max_num_seqs=4, max_num_batched_tokens=4, trace=True)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3, max_tokens=9), bed.add(4)
    counts = [list(bed.step().counts.items()) for _ in range(4)]
    assert counts == [
        [("r2", 3), ("r0", 1)],  # prompts first, then as many as the budget has left
        [("r1", 1), ("r0", 1), ("r2", 1)],  # r3 needs 4, and 3 are left
        [("r3", 4)],  # none was left out, so it joins at once
        [("r0", 1), ("r1", 1), ("r2", 1), ("r3", 1)],
    ]
    assert fields(bed.events("left_out"), "rids", "available") == [(("r1",), 4), (("r0", "r1", "r2"), 4)]
    assert bed.events("not_admitted")[-1].available == 3, "the token of r1 comes before the prompt of r3"


class SharedMemory(SlotManager):
    """Slots that have room for eight tokens in all."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.held: dict[str, int] = {}

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        others = sum(tokens for rid, tokens in self.held.items() if rid != request_id)
        return others + num_tokens <= 8 and super().can_hold(request_id, num_tokens)

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        self.held[request_id] = num_tokens
        return super().reserve(request_id, num_tokens)

    def release(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        super().release(request_id)


def test_requests_without_memory_wait_until_one_leaves() -> None:
    """A prompt in the queue, and a running request that needs room for another token."""
    bed = make_bed(max_num_seqs=4, kv_manager_class=SharedMemory, trace=True)
    for length in (4, 3, 3, 1):
        bed.add(length, max_tokens=2)
    assert [list(bed.step().counts) for _ in range(2)] == [["r0", "r1"], ["r0"]]
    assert bed.waiting() == ["r2", "r3"], "no request overtakes another"
    assert list(bed.step().counts) == ["r2", "r3", "r1"]
    assert bed.drain() == dict.fromkeys(["r0", "r1", "r2", "r3"], "length")
    assert {("r2", "kv_memory", 3)} <= set(fields(bed.events("not_admitted"), "rid", "limit", "needed"))


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    bed = make_bed(max_num_seqs=1)
    for length in (3, 5):
        bed.add(length, max_tokens=2, request_id="same")
        with pytest.raises(DuplicateRequestError, match="'same' is in use"):
            bed.scheduler.add_request(make_request("same", [1], SamplingParams()))
        assert bed.waiting() == ["same"]
        bed.drain()
        assert bed.said("same") == answer(bed.requests["same"].prompt_token_ids, 2)
    assert bed.steps[2].output.finished_req_ids == {"same"} == set(bed.steps[2].joined), "the end came first"


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one() -> None:
    bed = make_bed(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between schedule and update
    for _ in range(3):
        bed.add(3, 2)
    OnEvent(bed.scheduler.tracer, "result", lambda: bed.abort("r2"))
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


def test_the_first_reason_to_end_stands() -> None:
    bed = make_bed()
    aborted, failed = bed.add(3), bed.add(3)
    assert bed.abort("stranger") == []
    assert bed.abort(aborted, aborted) == [aborted]
    bed.fail([failed], ValueError("first"))
    assert bed.fail([aborted], ValueError("late")) == [] == bed.abort(failed)
    assert bed.step().ended == {aborted: "abort", failed: "error"}
    assert bed.abort(aborted) == []


def test_a_step_without_work_still_ends_what_was_aborted() -> None:
    bed = make_bed()
    bed.add(3), bed.add(3)
    bed.step()
    bed.add(3)
    bed.abort("r0", "r1", "r2")
    step = bed.step()
    assert step.output is None and step.ended == dict.fromkeys(["r0", "r1", "r2"], "abort")
    assert bed.drain() == step.ended


# --- what the invariants notice ---------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Any], object]] = {
    "a waiting request is lost": lambda bed: bed.scheduler.waiting.pop_request(),
    "a running request is lost": lambda bed: bed.scheduler.running.pop(0),
    "a request is forgotten": lambda bed: bed.scheduler.requests.pop("r0"),
    "a request runs twice": lambda bed: bed.scheduler.running.append(bed.scheduler.running[0]),
    "memory is kept": lambda bed: bed.scheduler.kv_manager.reserve("stranger", 1),
    "memory is freed too early": lambda bed: bed.scheduler.kv_manager.release("r0"),
    "a token is not counted": lambda bed: setattr(bed.requests["r0"].sequence, "num_computed_tokens", 1),
    "too many run": lambda bed: setattr(bed.scheduler, "max_num_seqs", 1),
    "a slot does not exist": lambda bed: setattr(bed.scheduler.kv_manager, "num_slots", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_invariants_notice(fault: str) -> None:
    bed: SchedulerBed = make_bed(max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2), bed.add(2), bed.add(4), bed.add(4)
    bed.step()
    bed.scheduler.check_invariants()
    FAULTS[fault](bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()
