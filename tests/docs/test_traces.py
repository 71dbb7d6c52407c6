"""The recorded traces of the site's players: events of today, whole runs, and each of them is shown on a page."""

import gzip
import re
from pathlib import Path

import pytest

from docs.traces import FOLDER, RUNS
from m1_single_request import read_trace
from m1_single_request.events import RequestAdded
from m1_single_request.output_events import Finish
from tests.docs.snippets import PAGES
from tests.events.milestones import MILESTONES

OTHERS = {"shared": "m4", "alone": "m4", "pieces": "m5", "whole": "m5", "pictures": "m6", "m7": "m6"}
"""Runs that are not named after the milestone that ran them."""


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_has_the_events_of_today_and_every_request_ends(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()))
    (milestone,) = (each for each in MILESTONES if each.startswith(OTHERS.get(name, name)[:2]))
    events = [record.event for record in read_trace(path, milestone)]
    arrived = {event.rid for event in events if isinstance(event, RequestAdded)}
    assert arrived and arrived == {event.rid for event in events if isinstance(event, Finish)}


def test_each_trace_is_shown_and_each_that_is_shown_exists() -> None:
    shown = {name for page in PAGES for name in re.findall(r"assets/traces/(\w+)\.jsonl\.gz", page.read_text("utf-8"))}
    assert shown == set(RUNS) == {path.name.removesuffix(".jsonl.gz") for path in FOLDER.iterdir()}
