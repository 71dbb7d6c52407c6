"""The scheduler by example: memory that is short, aborts.

What every scheduler does alike is tested in `tests/testbed/test_schedulers.py`.

Every step runs on the test-bed, which checks the messages and the invariants; what is asserted here comes on top. That
every decision follows the rules, whatever comes when, is tested in `test_scheduler_properties.py`.
"""

from typing import Any

from m2_continuous_batching.kv_manager import SlotManager
from tests.support.traces import fields
from tests.testbed.bed import make_bed


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


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_the_first_reason_to_end_stands() -> None:
    bed = make_bed()
    aborted, failed = bed.add(3), bed.add(3)
    assert bed.abort("stranger") == []
    assert bed.abort(aborted, aborted) == [aborted]
    bed.fail([failed], ValueError("first"))
    assert bed.fail([aborted], ValueError("late")) == [] == bed.abort(failed)
    assert bed.step().ended == {aborted: "abort", failed: "error"}
    assert bed.abort(aborted) == []
