"""Whatever befalls a request whose prompt is in pieces: it is given up, fails, loses its place, or finds no memory.

It stands in no queue then, and in no batch between two of its pieces; so every way out is tried in every state: before
its first piece, between two pieces, while one is in flight, and while its last one is.
"""

from typing import Any

import pytest

from m3_paged_attention.errors import KVCapacityError
from tests.testbed.pieces import PiecesBed, make_pieces_bed

SCHEDULES = pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])
STATES = pytest.mark.parametrize("num_pieces", [0, 1, 2, 3])


def in_pieces(num_pieces: int, **limits: Any) -> PiecesBed:
    """`r0` decodes, `r1` has computed so many of the four pieces of its prompt, `r2` waits."""
    bed = make_pieces_bed(**{"max_num_batched_tokens": 17, "page_size": 4, "max_num_seqs": 4} | limits)
    bed.add(5, max_tokens=30), bed.step()
    bed.add(60, max_tokens=3), bed.add(6, max_tokens=2)
    for _ in range(num_pieces):
        bed.step()
    assert len(bed.pieces_of("r1")) == num_pieces and bed.said("r1") == ()
    return bed


@pytest.mark.sample(15)
@STATES
@SCHEDULES
@pytest.mark.parametrize("prefix_cache", ["radix", "hash", "chunk"])
@pytest.mark.parametrize("late", [False, True], ids=["between", "in flight"])
def test_an_abort_ends_it_with_the_next_update(num_pieces: int, schedule: Any, prefix_cache: str, late: bool) -> None:
    bed = in_pieces(num_pieces, schedule=schedule, prefix_cache=prefix_cache)
    if late:
        step = bed.step(between=lambda decision: bed.abort("r1"))
        assert "r1" in step.output.prompts, "the model had begun"
    else:
        bed.abort("r1")
        step = bed.step()
        assert "r1" not in step.output.rids
    assert step.ended == {"r1": "abort"} and bed.said("r1") == ()
    assert bed.chunked() != "r1"
    assert bed.drain() == {"r1": "abort", "r2": "length", "r0": "length"}


@STATES
@pytest.mark.parametrize("crash", [False, True], ids=["its own error", "the step's"])
def test_an_error_ends_it_and_nothing_of_the_failed_piece_is_shared(num_pieces: int, crash: bool) -> None:
    bed = in_pieces(num_pieces)
    step = bed.step(crash=crash, failing=["r1"])
    assert step.ended == dict.fromkeys(step.output.rids if crash else ["r1"], "error")
    bed.add(60, max_tokens=1, same_as="r1")
    bed.drain()
    first = next(decision for decision in bed.decisions if "r3" in decision.prompts)
    assert first.hits["r3"] == 16 * num_pieces, "what was sound is still there"


@STATES
def test_a_step_without_a_result_sends_it_back_unharmed(num_pieces: int) -> None:
    bed = in_pieces(num_pieces)
    batch = bed.schedule()
    rids = batch.rids
    bed.scheduler.update_from_output(batch, None)
    assert {"r0", "r1"} <= set(rids) and bed.scheduler.running == [] and bed.waiting()[-len(rids) :]
    bed.checks = None  # who went back without having been retracted is unknown to it
    bed.drain()
    assert len(bed.said("r1")) == 3 and len(bed.said("r0")) == 30


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_a_part_in_pieces_is_the_first_to_lose_its_place_and_keeps_what_it_has_shared(num_pieces: int) -> None:
    bed = in_pieces(num_pieces, trace=True)
    bed.pools.due = 1
    decision = bed.step().output
    bed.pools.release()
    assert bed.retracted() == ["r1"] and decision.rids == ("r0",), "nobody is let in in such a step"
    assert bed.chunked() is None and bed.reqs["r1"].kv_committed_len == 0
    (event,) = bed.events("retract")
    assert (event.rid, event.num_tokens, event.num_output_tokens) == ("r1", 16 * num_pieces, 0)
    decision = bed.step().output
    assert decision.hits["r1"] == 16 * num_pieces and next(iter(decision.prompts)) == "r1", "it goes on where it was"
    bed.drain()
    assert sum(bed.pieces_of("r1")) == 60


def test_whoever_is_retracted_while_a_prompt_is_in_pieces_waits_for_it() -> None:
    """The policy chooses r0 each time: then nobody decodes, and the piece still runs."""

    class Oldest:
        def choose_victim(self, running: Any) -> Any:
            return min(running, key=lambda req: req.number)

    bed = in_pieces(1, preemption=Oldest())
    bed.pools.due = 1
    decision = bed.step().output
    bed.pools.release()
    assert bed.retracted() == ["r0"] and decision.num_scheduled_tokens == {"r1": 17}
    assert bed.drain().keys() == {"r0", "r1", "r2"}


# --- too little memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "budget", "pieces"),
    [
        (1, 44, 6, [4, 4, 4, 4, 2, 6, 6, 6, 2]),
        (4, 48, 8, [6, 6, 4, 8, 8]),
        (4, 48, 5, [3, 3, 3, 3, 3, 1, 5, 5, 5, 1]),
    ],
)
def test_a_prompt_that_is_crowded_out_by_those_who_decode_comes_back_and_ends(
    page_size: int, num_tokens: int, budget: int, pieces: list[int]
) -> None:
    """Two grow while it is in pieces: first its piece becomes smaller, a page for each of them being kept, then it has
    to go. It comes back when they have ended, and finds what it shared as far as that was not needed."""
    bed = make_pieces_bed(
        num_tokens=num_tokens, page_size=page_size, max_num_batched_tokens=budget, conservativeness=0, trace=True
    )
    bed.add(6, max_tokens=16), bed.add(6, max_tokens=16)
    while not bed.said("r1"):
        bed.step()
    bed.add(20, max_tokens=3)
    assert set(bed.drain().values()) == {"length"}
    assert [req.num_retractions for req in bed.reqs.values()] == [0, 0, 1]
    assert bed.pieces_of("r2") == pieces
    (cut,) = [cut for cut in bed.events("chunk_cut") if cut.bound_by == "memory"]
    assert cut.rid == "r2" and "because there is no free memory for more" in cut.explain()


@SCHEDULES
@pytest.mark.parametrize(
    ("num_tokens", "page_size", "length", "pieces"), [(32, 1, 28, [16, 12]), (48, 16, 33, [16, 16, 1])]
)
def test_the_last_piece_may_leave_no_room_for_anybody_else(
    schedule: Any, num_tokens: int, page_size: int, length: int, pieces: list[int]
) -> None:
    """It is alone, and the memory is spoken for: that is no reason to refuse it."""
    bed = make_pieces_bed(num_tokens=num_tokens, page_size=page_size, max_num_batched_tokens=16, schedule=schedule)
    bed.add(length, max_tokens=3), bed.add(5, max_tokens=2)
    assert bed.drain() == {"r0": "length", "r1": "length"}
    assert bed.pieces_of("r0") == pieces


def test_whoever_has_outgrown_the_memory_fails_alone() -> None:
    bed = make_pieces_bed(num_tokens=24, max_num_batched_tokens=8, conservativeness=0, max_model_len=64)
    bed.add(12, max_tokens=40), bed.add(12, max_tokens=3)
    assert bed.drain() == {"r0": "error", "r1": "length"}
    assert isinstance(bed.error_of("r0"), KVCapacityError) and len(bed.said("r0")) == 13
