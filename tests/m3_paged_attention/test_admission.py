"""Admission by blocks: which way a request comes in, what that costs, and which limit keeps it out."""

from typing import Any

import pytest

from tests.testbed.paged import make_paged_bed

# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "joins"), [(5, False), (6, True)])
def test_one_block_stays_free_for_each_that_runs(num_blocks: int, joins: bool) -> None:
    """Two requests of two blocks each: four blocks, and one more for either of them."""
    bed = make_paged_bed(num_blocks=num_blocks, block_size=4, trace=True)
    bed.add(5, max_tokens=3), bed.add(7, max_tokens=3)
    assert bed.step().joined == (["r0", "r1"] if joins else ["r0"])
    refusals = [(event.rid, event.limit, event.needed, event.available) for event in bed.events("not_admitted")]
    assert refusals == ([] if joins else [("r1", "blocks", 2, 3)])
    if not joins:
        (refusal,) = bed.events("not_admitted")
        assert refusal.kept_free == 2
        assert "it needs 2 blocks of 3 free ones, and 2 must stay free for the next tokens" in refusal.explain()
    bed.drain()
    assert bed.scheduler.num_preemptions == 0


# --- places and tokens ------------------------------------------------------------------------------------------------


def test_as_many_join_as_may_run() -> None:
    bed = make_paged_bed(max_num_seqs=2, trace=True)
    rids = [bed.add(3, max_tokens=2) for _ in range(5)]
    assert [bed.step().joined for _ in range(6)] == [rids[:2], [], rids[2:4], [], rids[4:], []]
    refusal = bed.events("not_admitted")[0]
    assert (refusal.rid, refusal.limit, refusal.needed, refusal.available) == (rids[2], "max_num_seqs", 3, 2)
    assert refusal.num_waiting == 3 and "max_num_seqs = 2 requests run already" in refusal.explain()


def test_prompts_join_as_far_as_the_budget_reaches() -> None:
    bed = make_paged_bed(max_num_seqs=4, max_num_batched_tokens=10, trace=True)
    for length in (4, 6, 1, 10):
        bed.add(length, max_tokens=1)
    assert [bed.step().counts for _ in range(3)] == [{"r0": 4, "r1": 6}, {"r2": 1}, {"r3": 10}]
    refusals = [(event.rid, event.limit, event.needed, event.available) for event in bed.events("not_admitted")]
    assert refusals == [("r2", "max_num_batched_tokens", 1, 0), ("r3", "max_num_batched_tokens", 10, 9)]


# --- the ways in ------------------------------------------------------------------------------------------------------


def admitted(bed: Any) -> list[tuple[Any, ...]]:
    return [(event.rid, event.how, event.prefix, event.extend, event.num_blocks) for event in bed.events("admit")]


def test_a_sibling_costs_nothing_while_the_prompt_is_computed_and_a_copy_afterwards() -> None:
    bed = make_paged_bed(block_size=4, max_num_seqs=2, trace=True)
    bed.add(6, max_tokens=3, n=3)
    bed.drain()
    assert admitted(bed) == [
        ("r0/0", "prefill", 0, 6, 2),
        ("r0/1", "fork", 0, 0, 0),  # in the same step: it starts in the next one
        ("r0/2", "fork", 5, 1, 1),  # when r0/0 has left its place; r0/1 still runs
    ]
    _, second, _ = bed.events("admit")
    assert "it starts when that prompt is computed" in second.explain()


def test_a_sibling_whose_siblings_have_ended_computes_the_prompt_itself() -> None:
    bed = make_paged_bed(block_size=4, max_num_seqs=1, trace=True)
    bed.add(6, max_tokens=2, n=2)
    bed.drain()
    assert admitted(bed) == [("r0/0", "prefill", 0, 6, 2), ("r0/1", "prefill", 0, 6, 2)]


def test_a_late_sibling_starts_on_the_blocks_of_one_that_decodes() -> None:
    bed = make_paged_bed(block_size=4, max_num_seqs=2, trace=True)
    bed.add(3, max_tokens=2), bed.add(6, max_tokens=5, n=2)
    for _ in range(3):
        bed.step()
    assert admitted(bed)[2:] == [("r1/1", "fork", 5, 1, 1)]
    assert bed.events("admit")[-1].source == "r1/0"
    assert "r1/1 joins on the blocks of r1/0" in bed.events("admit")[-1].explain()
    bed.drain()
