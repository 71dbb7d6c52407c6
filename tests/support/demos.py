"""What the tests of the demos of all milestones share."""

import json
from pathlib import Path
from typing import Any


def words(text: str) -> str:
    """A text without its line breaks: the console makes them anywhere."""
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


def events_of(trace: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a trace file; those of one kind, if it is given."""
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if kind in (None, event["event"])]
