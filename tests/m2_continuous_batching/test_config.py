"""How an m2 engine runs its batches. The limits of a batch are tested for all milestones in `tests/engine_contract`."""

from typing import Any

import pytest

from m2_continuous_batching import ConfigError, SchedulerConfig


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ("paged", "execution='paged' is unknown: use per_request or padded"),
        (None, "execution=None"),
        (["padded"], r"execution=\['padded'\]"),
    ],
    ids=str,
)
def test_an_unknown_execution_is_refused(execution: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(execution=execution)


def test_both_executions_are_accepted_and_padded_is_the_default() -> None:
    assert SchedulerConfig().execution == "padded"
    assert [SchedulerConfig(execution=way).execution for way in ("padded", "per_request")] == ["padded", "per_request"]
