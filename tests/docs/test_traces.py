"""The recorded traces of the site are those that its pages show, with the events and the sentences of today's code."""

import dataclasses
import gzip
import json
import re
from typing import Any

import msgspec
import pytest

from docs.source_code import ROOT
from docs.traces import FOLDER, RUNS
from m1_single_request.trace_event import Event
from tests.events.milestones import MILESTONES, event_classes

CLASSES = [cls for milestone in MILESTONES for cls in event_classes(milestone)]
FORMS = [(cls.kind_name(), {field.name for field in dataclasses.fields(cls)}, cls) for cls in CLASSES]


def test_each_run_has_its_file_and_its_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.jsonl.gz" for name in RUNS}
    assert {f"{name}.jsonl.gz" for name in RUNS} == set(re.findall(r"\]\(assets/traces/([\w.]+)", pages))


def explained(kind: str, data: dict[str, Any]) -> set[str]:
    """Return the sentences of the events of this kind that have these fields: one, or that of each milestone."""
    fits = [cls for name, fields, cls in FORMS if name == kind and fields == data.keys()]
    events: list[Event] = [msgspec.convert(data, cls) for cls in fits]
    return {event.explain() for event in events}


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_has_the_sentences_of_todays_code(name: str) -> None:
    for line in gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).decode().splitlines():
        data = json.loads(line)
        _, _, kind, sentence = (data.pop(column) for column in ("step", "time", "event", "sentence"))
        assert sentence in explained(kind, data), f"{kind}: run: python -m docs.traces {name}"
