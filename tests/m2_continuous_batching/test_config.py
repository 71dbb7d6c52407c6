"""How an m2 engine runs its batches. The limits of a batch are tested for all milestones in `tests/engine_contract`."""

from m2_continuous_batching import SchedulerConfig


def test_both_executions_are_accepted_and_padded_is_the_default() -> None:
    assert SchedulerConfig().execution == "padded"
    assert [SchedulerConfig(execution=way).execution for way in ("padded", "per_request")] == ["padded", "per_request"]
