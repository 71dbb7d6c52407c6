"""Admission by example: siblings on shared blocks.

Every decision and every message is judged in `test_scheduler_properties.py`.
"""

from typing import Any

from tests.testbed.paged import make_paged_bed


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
