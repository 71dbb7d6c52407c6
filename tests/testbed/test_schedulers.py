"""What every scheduler does alike, by example: idle steps, ids, aborts at a bad moment, a budget for those who run.

Every step runs on the test-bed, which judges the messages of the scheduler and reads its memory.
"""

from collections.abc import Callable
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m3_paged_attention.errors import KVCapacityError
from tests.support.engines import OnEvent
from tests.support.traces import fields
from tests.testbed.bed import make_bed
from tests.testbed.fakes import make_request
from tests.testbed.paged import make_paged_bed
from tests.testbed.pieces import make_pieces_bed
from tests.testbed.radix import make_radix_bed

MakeBed = Callable[..., Any]
BEDS: dict[str, MakeBed] = {"m2": make_bed, "m3": make_paged_bed, "m4": make_radix_bed, "m5": make_pieces_bed}
each_bed = pytest.mark.parametrize("make", BEDS.values(), ids=BEDS)


@each_bed
def test_an_idle_scheduler_schedules_nothing(make: MakeBed) -> None:
    bed = make(trace=True)
    for _ in range(2):
        step = bed.step()
        assert step.counts == {} and step.changed == []
    assert bed.events() == []


@each_bed
def test_an_id_is_refused_while_it_is_in_use_and_can_then_be_used_again_at_once(make: MakeBed) -> None:
    """From m3 on the families check it; before, the face does."""
    bed = make(max_num_seqs=1)
    for length in (3, 5):
        bed.add(length, max_tokens=2, request_id="same")
        if hasattr(bed, "families"):
            with pytest.raises(DuplicateRequestError, match="'same' is in use"):
                bed.families.add_request(make_request("same", [1], SamplingParams(), request_class=bed.request_class))
        assert bed.waiting() == ["same"]
        while bed.scheduler.requests:
            bed.step()
    assert len(bed.steps) == 4


@each_bed
def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one(make: MakeBed) -> None:
    bed = make(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between the two verbs
    for _ in range(3):
        bed.add(3, 2)
    OnEvent(bed.scheduler.tracer, "result", lambda: bed.abort("r2"))
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (make_paged_bed, {"num_blocks": 2, "block_size": 4}),
        (make_radix_bed, {"num_tokens": 8}),
        (make_pieces_bed, {"num_tokens": 8}),
    ],
    ids=["m3", "m4", "m5"],
)
def test_a_prompt_over_the_pool_that_intake_let_pass_fails_alone(make: MakeBed, limits: dict[str, int]) -> None:
    bed = make(**limits)
    before, too_long, after = bed.add(3), bed.add(9), bed.add(3)
    assert bed.drain(limit=50) == {too_long: "error", before: "length", after: "length"}
    assert isinstance(bed.error_of(too_long), KVCapacityError)


@pytest.mark.parametrize("make", [make_bed, make_paged_bed], ids=["m2", "m3"])
def test_running_requests_that_the_budget_left_out_go_first_in_the_next_step(make: MakeBed) -> None:
    bed = make(max_num_seqs=4, max_num_batched_tokens=4, trace=True)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9)
    bed.step()
    bed.add(3, max_tokens=9), bed.add(4)
    assert [bed.step().counts for _ in range(4)] == [
        {"r2": 3, "r0": 1},  # prompts first, then as many as the budget has left
        {"r1": 1, "r0": 1, "r2": 1},  # r3 needs 4, and 3 are left
        {"r3": 4},  # none was left out, so it joins at once
        {"r0": 1, "r1": 1, "r2": 1, "r3": 1},
    ]
    events = bed.events("left_out")
    assert fields(events, "rids", "available") == [(("r1",), 4), (("r0", "r1", "r2"), 4)]
    assert "the budget of 4 is used up" in events[0].explain()
    assert bed.events("not_admitted")[-1].available == 3, "the token of r1 comes before the prompt of r3"


FAULTS: dict[str, Callable[[Any], object]] = {
    "a waiting request is lost": lambda bed: bed.scheduler.waiting.pop_request(),
    "a running request is lost": lambda bed: bed.scheduler.running.pop(0),
    "a request is forgotten": lambda bed: bed.scheduler.requests.pop("r0"),
    "a request runs twice": lambda bed: bed.scheduler.running.append(bed.scheduler.running[0]),
    "memory has no owner": lambda bed: bed.scheduler.kv_manager.reserve("stranger", 1),
    "memory is freed too early": lambda bed: bed.scheduler.kv_manager.release("r0"),
    "a token is not counted": lambda bed: setattr(bed.requests["r0"].sequence, "num_computed_tokens", 1),
    "a token counts twice": lambda bed: setattr(bed.requests["r0"].sequence, "num_computed_tokens", 3),
    "too many run": lambda bed: setattr(bed.scheduler, "max_num_seqs", 1),
}
OF_SLOTS = {"a slot does not exist": lambda bed: setattr(bed.scheduler.kv_manager, "num_slots", 1)}
OF_BLOCKS = {"a request has too much memory": lambda bed: bed.scheduler.kv_manager.reserve("r0", 9)}


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        pytest.param(make, spoil, id=f"{name}, {fault}")
        for name, make, own in (("m2", make_bed, OF_SLOTS), ("m3", make_paged_bed, OF_BLOCKS))
        for fault, spoil in (FAULTS | own).items()
    ],
)
def test_the_invariants_notice(make: MakeBed, spoil: Callable[[Any], object]) -> None:
    """Those of m4 and later: in their own folders."""
    bed = make(max_num_seqs=3, max_num_batched_tokens=4)
    bed.add(2), bed.add(2), bed.add(4), bed.add(4)
    bed.step()
    bed.scheduler.check_invariants()
    spoil(bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()
