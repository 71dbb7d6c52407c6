"""The trace of rank 0 of two is the stored one, and that of rank 1 differs from it in its own part of the model alone.

When a change of the trace is intended, record it again and read the difference before committing it:

    python -m tests.m8_parallel.test_golden_trace
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.m8_parallel.groups import Group
from tests.m8_parallel.test_engine import Groups
from tests.support.golden import GoldenTrace, events


def record(path: Path) -> None:
    """Two questions on two ranks, the second one while the first is answered; write the stable trace to `path`."""
    with TemporaryDirectory() as folder:
        group = Group(2, Path(folder) / "group")
        try:
            group.ask("golden", path=str(path))
        finally:
            group.close()


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "two_ranks.jsonl", record)


def test_every_step_has_its_collectives_and_both_ranks_their_part() -> None:
    found = GOLDEN.by_kind()
    (joined,) = found["ranks_joined"]
    assert (joined["rank"], joined["size"], joined["num_kv_heads"]) == (0, 2, 1)
    assert len(found["collectives"]) == len(found["batch"]) == len(found["step_done"])
    assert {event["reason"] for event in found["finish"]} == {"length"} and len(found["finish"]) == 2


def test_the_trace_of_rank_1_differs_in_its_part_alone(groups: Groups, tmp_path: Path) -> None:
    groups(2).ask("golden", path=str(tmp_path / "trace.jsonl"))
    first, second = events(tmp_path / "trace.jsonl"), events(tmp_path / "trace.rank-1.jsonl")

    def decided(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kinds = ("batch", "admit", "matched", "commit", "kv_usage", "inserted")
        return [event for event in trace if event["event"] in kinds]

    assert decided(first) == decided(second) != []


if __name__ == "__main__":
    GOLDEN.record_again()
