"""The trace of each milestone is its stored one, event for event, on every machine.

What is recorded, and what the trace must show, stands in the `test_golden_trace.py` of the milestone.
"""

import importlib
from pathlib import Path

import pytest

from tests.events.milestones import MILESTONES
from tests.support.golden import GoldenTrace


@pytest.fixture(params=MILESTONES)
def golden(request: pytest.FixtureRequest) -> GoldenTrace:
    """The stored trace of every milestone."""
    found: GoldenTrace = importlib.import_module(f"tests.{request.param}.test_golden_trace").GOLDEN
    return found


def test_the_trace_is_the_stored_one(golden: GoldenTrace, tmp_path: Path) -> None:
    golden.check(tmp_path / "trace.jsonl")


def test_every_stored_event_of_requests_names_one(golden: GoldenTrace) -> None:
    """None, or an empty tuple, is for a cache that is used outside an engine."""
    for event in golden.stored():
        assert event.get("rid", "") is not None and event.get("rids") != [], event


def test_the_stored_trace_holds_nothing_that_another_machine_would_compute_otherwise(golden: GoldenTrace) -> None:
    golden.check_portable()
