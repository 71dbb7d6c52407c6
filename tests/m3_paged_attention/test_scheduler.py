"""The scheduler of blocks by example: requests that join, go on and leave, and the messages about them.

What every scheduler does alike is tested in `tests/testbed/test_schedulers.py`.

Every step runs on the test-bed: the messages are judged, and an oracle reads every slot of KV that a request uses. What
is asserted here comes on top. Preemption, forks and lost steps have files of their own.
"""

import dataclasses
from typing import Any

import pytest

from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.m3_paged_attention.engines import starts
from tests.testbed.bed import Step
from tests.testbed.paged import make_paged_bed


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
    assert set(starts(step.output).values()) == {0}
    assert [data.block_ids for data in step.output.scheduled_new_reqs] == [[1, 2, 3], [4], [5, 6]]

    step = bed.step()
    assert step.output.total_num_scheduled_tokens == 3 and starts(step.output) == {first: 9, second: 3, third: 5}
    assert new_blocks(step) == {first: [], second: [], third: []}, "each has room in its last block"
    assert step.ended == {second: "length"} and bed.running() == [first, third]

    newcomer = bed.add(12)
    step = bed.step()
    assert step.counts == {newcomer: 12, first: 1, third: 1} and step.output.total_num_scheduled_tokens == 14
    assert starts(step.output) == {newcomer: 0, first: 10, third: 6}
    assert step.output.finished_req_ids == {second}
    assert step.output.scheduled_new_reqs[0].block_ids == [7, 8, 9], "the block that was freed first is given out first"
    assert bed.drain() == {second: "length", first: "length", third: "length", newcomer: "length"}


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
