"""The test-bed itself: its rule, and that it notices a scheduler that lies."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.scheduler_output import SchedulerOutput
from tests.testbed.bed import make_bed
from tests.testbed.fakes import FakeRunner, Row

# --- the fake model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row("a", (5,), 3, [])], "starts at 3, but has KV for 2"),
        ([Row("b", (5,), 0, [0])], "block 0 is given to b, but a"),
        ([Row("a", (5,), 2, []), Row("a", (6,), 2, [])], "two rows"),
        ([Row("a", (), 2, [])], "empty row"),
    ],
    ids=["a hole", "a taken block", "two rows", "an empty row"],
)
def test_the_runner_refuses_what_no_model_could_run(rows: list[Row], message: str) -> None:
    runner = FakeRunner()
    runner.run([Row("a", (1, 2), 0, [0])])
    with pytest.raises(AssertionError, match=message):
        runner.run(rows)


# --- the bed ----------------------------------------------------------------------------------------------------------


class Changed(Scheduler):
    """Sends another decision than it made."""

    change: Callable[[SchedulerOutput], dict[str, Any]]

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        return dataclasses.replace(output, **type(self).change(output))


def cached(**changes: Any) -> Callable[[SchedulerOutput], dict[str, Any]]:
    """Changes columns of the data of those that go on."""

    def change(output: SchedulerOutput) -> dict[str, Any]:
        data = output.scheduled_cached_reqs
        columns = {name: [value] * len(data.req_ids) for name, value in changes.items()}
        return {"scheduled_cached_reqs": dataclasses.replace(data, **columns)}

    return change


LIES: dict[str, Callable[[SchedulerOutput], dict[str, Any]]] = {
    "start position": cached(num_computed_tokens=4),
    "token": cached(new_token_ids=[5]),
    "block": cached(new_block_ids=[3]),
    "total": lambda output: {"total_num_scheduled_tokens": output.total_num_scheduled_tokens + 1},
    "an end twice": lambda output: {"finished_req_ids": frozenset({"r0"})},
    "nobody runs": lambda output: {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_a_message_is_noticed(lie: str) -> None:
    class Liar(Changed):
        change = staticmethod(LIES[lie])

    bed = make_bed(scheduler_class=Liar)
    bed.add(3)
    with pytest.raises(AssertionError):
        for _ in range(3):
            bed.step()


class Overtaking(Scheduler):
    def schedule(self) -> SchedulerOutput:
        self.waiting.reverse()  # type: ignore[attr-defined]
        return super().schedule()


class Leaking(SlotManager):
    def release(self, request_id: str) -> None:
        """Keeps it."""


class Sharing(SlotManager):
    """Gives slot 0 to every request."""

    def block_ids(self, request_id: str) -> list[int]:
        return [0]

    def owned(self) -> dict[str, list[int]]:
        return {rid: [0] for rid in super().owned()}


class Frees(Scheduler):
    """Frees an aborted request at once."""

    def finish_requests(self, request_ids: Any, reason: Any) -> list[str]:
        for rid in request_ids:
            self.kv_manager.release(rid)
        return super().finish_requests(request_ids, reason)


@pytest.mark.parametrize(
    "parts",
    [
        {"scheduler_class": Overtaking},
        {"kv_manager_class": Leaking},
        {"kv_manager_class": Sharing},
        {"scheduler_class": Frees},
    ],
    ids=lambda parts: next(iter(parts.values())).__name__,
)
def test_a_part_that_breaks_a_rule_is_noticed(parts: dict[str, Any]) -> None:
    bed = make_bed(max_num_seqs=2, **parts)
    rids = [bed.add(3), bed.add(4, max_tokens=1), bed.add(5)]
    with pytest.raises(AssertionError):
        bed.step(between=lambda output: bed.abort(rids[0]))
