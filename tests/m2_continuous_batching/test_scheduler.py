"""The scheduler by example: a batch that requests join and leave, memory that is short, aborts.

What every scheduler does alike is tested in `tests/testbed/test_schedulers.py`.

Every step runs on the test-bed, which checks the messages and the invariants; what is asserted here comes on top. That
every decision follows the rules, whatever comes when, is tested in `test_scheduler_properties.py`.
"""

from typing import Any

from m2_continuous_batching.input_batch import prepare_inputs_from_scheduler_output
from m2_continuous_batching.kv_manager import SlotManager
from tests.support.traces import fields
from tests.testbed.bed import make_bed


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
