"""Trace files: every event of every milestone is read back as it was written; what is no event is an error."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest

from m1_single_request import ConfigError, JsonlReader, TraceRecord, read_trace
from m1_single_request.trace_event import Event
from m1_single_request.trace_file import event_classes
from tests.events.milestones import MILESTONES


def examples(kind: Any) -> list[Any]:
    """Values of a type of a field: one for each alternative."""
    if get_origin(kind) is UnionType:
        return [value for each in get_args(kind) for value in examples(each)]
    if hasattr(kind, "_fields"):  # a named tuple
        return [kind(*(examples(each)[0] for each in get_type_hints(kind).values()))]
    if get_origin(kind) is tuple:
        parts = [each for each in get_args(kind) if each is not Ellipsis]
        firsts = tuple(examples(each)[0] for each in parts)
        return [firsts, firsts * 2, ()] if Ellipsis in get_args(kind) else [firsts]
    return {int: [3], str: ["'ä' \n\ud800"], float: [0.25, float("inf")], bool: [True, False], NoneType: [None]}[kind]


def events(event_class: type[Event]) -> Iterator[Event]:
    """Events of a class that together have each example of each field."""
    hints = {n: kind for n, kind in get_type_hints(event_class).items() if get_origin(kind) is not ClassVar}
    for number in range(4):
        yield event_class(**{n: (own := examples(kind))[number % len(own)] for n, kind in hints.items()})


@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_event_is_read_as_it_was_written(milestone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [each for kind, each in event_classes(milestone).items() if each is not Event]
    for each in classes:
        monkeypatch.setattr(each, "explain", lambda event: "these values make no sense")
    assert len(classes) > 10 and any(each.__module__.startswith(milestone) for each in classes)
    written = [TraceRecord(i, 0.5, event) for each in classes for i, event in enumerate(events(each))]
    writer = JsonlReader(tmp_path / "trace.jsonl")
    for record in written:
        writer.read(record)
    writer.close()
    read = list(read_trace(tmp_path / "trace.jsonl", milestone))
    assert read == written and [type(a.event) for a in read] == [type(b.event) for b in written]


@pytest.mark.parametrize(("older", "newer"), list(pairwise(MILESTONES)))
def test_a_milestone_reads_its_own_events_and_those_before_it(older: str, newer: str) -> None:
    before, now = event_classes(older), event_classes(newer)
    assert before.keys() <= now.keys() and not any(each.__module__.startswith(newer) for each in before.values())
    for kind, each in now.items():
        assert each.__module__.startswith(newer) or each is before[kind], "the newest class of a kind"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "time": 0.5, "event": "unheard_of"}',
        '{"step": 1, "time": 0.5, "event": "free", "owner": 7, "tokens": 1, "bytes": 1}',
        '{"step": 1, "time": 0.5, "event": "free", "owner": "a", "tokens": 1}',
        '{"step": 1, "event": "free", "owner": "a", "tokens": 1, "bytes": 1}',
        "no JSON",
        "[]",
        "3",
    ],
    ids=["kind", "type", "missing field", "no time", "no JSON", "a list", "a number"],
)
def test_what_is_no_event_is_an_error_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"step": 1, "time": 0.5, "event": "free", "owner": "a", "tokens": 1, "bytes": 1}\n' + line)
    records = read_trace(path, "m1_single_request")
    assert next(records).event.kind == "free"
    with pytest.raises(ConfigError, match=r"line 2 of .*trace.jsonl' is no event of m1_single_request"):
        next(records)
