"""The events of every milestone, with an example of each: what the tests beside this file hold to one contract.

A milestone that brings events joins by being there. Its events stand in modules whose names end with `events`, its
examples in the table `EXAMPLES` of `tests/<milestone>/event_examples.py`, each with words that its sentences must hold.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from m1_single_request.trace_event import Event

ROOT = Path(__file__).parents[2]
MILESTONES = sorted({path.relative_to(ROOT).parts[0] for path in ROOT.glob("m[1-9]_*/**/*events.py")})


def event_modules(milestone: str) -> list[ModuleType]:
    """All modules of a milestone that hold events."""
    paths = sorted((ROOT / milestone).rglob("*events.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [importlib.import_module(name) for name in names]


def event_classes(milestone: str) -> list[type[Event]]:
    """All events that a milestone defines itself."""
    return [
        value
        for module in event_modules(milestone)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Event) and value.__module__ == module.__name__
    ]


def examples(milestone: str) -> Mapping[Event, Sequence[str]]:
    """Events of a milestone, each with words that its sentences must hold."""
    table: Mapping[Event, Sequence[str]] = importlib.import_module(f"tests.{milestone}.event_examples").EXAMPLES
    return table
