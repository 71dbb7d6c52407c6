"""A scheduler of blocks, or its memory, that forgets something is noticed by the test-bed.

What every scheduler does alike is tested in `tests/testbed/test_schedulers.py`. Every decision and every message of
m3's is judged in `test_scheduler_properties.py`; preemption, forks and lost steps have files of their own.
"""

import dataclasses
from typing import Any

import pytest

from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.testbed.paged import make_paged_bed


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
