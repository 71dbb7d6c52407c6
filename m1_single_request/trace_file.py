"""Reader of trace files: `JsonlReader` writes them, and a view of a past run reads them.

for record in read_trace("trace.jsonl", "m3_paged_attention"):
    block_map.read(record)
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec

from m1_single_request.errors import ConfigError, shown_path
from m1_single_request.trace_event import Event
from m1_single_request.tracer import TraceRecord


def read_trace(path: str | Path, milestone: str) -> Iterator[TraceRecord]:
    """Yield the records of a file that the package `milestone` has written, without `stable=True`.

    Raises `ConfigError` for a line that is no event of this milestone, and `OSError` for a file that cannot be read.
    """
    classes = event_classes(milestone)
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                step, seconds, kind = data.pop("step"), data.pop("time"), data.pop("event")
                data.pop("sentence", None)
                event: Event = msgspec.convert(data, classes[kind])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                reason = f"line {number} of {shown_path(path)} is no event of {milestone}: {error!r}"
                raise ConfigError(reason) from error
            yield TraceRecord(step, seconds, event)


def event_classes(milestone: str) -> dict[str, type[Event]]:
    """Return the event class of each kind: the newest one of this milestone and those before it."""
    import_module(milestone)
    classes = [Event]
    for each in classes:
        classes += each.__subclasses__()
    own = [each for each in sorted(classes, key=package) if package(each) <= milestone]
    return {each.kind_name(): each for each in own}


def package(event_class: type[Event]) -> str:
    """Return the top package of a class: those of the milestones are in alphabetical order."""
    return event_class.__module__.partition(".")[0]
