"""Every event of every milestone explains itself in sentences, with its numbers, its requests and plain data.

What is special to an event, and whether a trace is true, is tested in the `test_trace.py` of its milestone.
"""

import ast
import dataclasses
import inspect
import json
import re
from itertools import pairwise
from typing import Any

import pytest

from m1_single_request.trace_event import Event
from tests.events.milestones import MILESTONES, event_classes, event_modules, examples

VOLATILE = {
    "sampled": {"candidates"},
    "step_done": {"laps"},
    "costs_measured": {"num_tokens", "step_ms", "context_ms", "decode_context_ms"},
    "encoder_run": {"milliseconds"},
    "graphs_captured": {"milliseconds", "num_bytes"},
    "chunk_sent": {"seconds"},
    "chunk_received": {"seconds"},
    "reported": {"text"},
    "step_arrived": {"device_ms", "waited_ms"},
    "acknowledged": {"copy_ms"},
    "prefetched": {"waited_ms"},
    "collectives": {"began", "seconds"},
}
"""What may differ between runs or machines, by the kind of event; nothing else may."""

STAMP = {"step", "time", "event"}
"""What `JsonlReader` writes in front of an event's data."""

ABOUT_REQUESTS = {"rid", "rids", "owner"}
"""Fields with the ids of the requests of an event: one of them, unless the event is an exception."""

WITHOUT_REQUEST = {
    "the engine when it starts": "engine_started experts_loaded backend_chosen step_limits eager_steps threads_changed "
    "kv_sized costs_measured graphs_captured graphs_unavailable normal_order ranks_joined",
    "a step or its forward as a whole; `batch` of the same step has the requests": "step_done forward kv_usage "
    "blocks_used audit step_launched step_arrived experts_used collectives",
    "the whole cache or a tier, flushed by a call of the user": "cache_flushed host_flushed",
    "the disk, to which pages are written beside the steps": "disk_failed",
    "an engine or a process, and the way between two of them": "path_chosen engine_joined engine_refused "
    "media_process_lost",
}
"""Kinds of events that no request causes, by what they are about."""

SHORT = {milestone: milestone.partition("_")[0] for milestone in MILESTONES}
CLASSES = [
    pytest.param(milestone, cls, id=f"{SHORT[milestone]}-{cls.__name__}")
    for milestone in MILESTONES
    for cls in event_classes(milestone)
]
EXAMPLES = [
    pytest.param(event, words, id=f"{SHORT[milestone]}-{event.kind}")
    for milestone in MILESTONES
    for event, words in examples(milestone).items()
]
each_class = pytest.mark.parametrize(("milestone", "cls"), CLASSES)
each_example = pytest.mark.parametrize(("event", "words"), EXAMPLES)


@pytest.mark.parametrize("milestone", MILESTONES)
def test_there_is_an_example_of_every_event(milestone: str) -> None:
    assert {type(event) for event in examples(milestone)} == set(event_classes(milestone)) != set()


# --- classes ----------------------------------------------------------------------------------------------------------


@each_class
def test_every_event_is_documented_frozen_and_named_after_its_class(milestone: str, cls: type[Event]) -> None:
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), "a docstring of its own, not the dataclass's"
    event = next(event for event in examples(milestone) if type(event) is cls)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", event.kind)
    words = re.fullmatch("".join(f"({word})" for word in event.kind.split("_")), cls.__name__, re.IGNORECASE)
    assert words and all(re.fullmatch(r"[A-Z]+[0-9]*|[A-Z][a-z0-9]+", word) for word in words.groups())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(event)[0].name, None)


@each_class
def test_no_field_has_the_name_of_a_column_of_every_record(milestone: str, cls: type[Event]) -> None:
    assert STAMP.isdisjoint(field.name for field in dataclasses.fields(cls))


@each_class
def test_every_event_has_the_requests_that_cause_it_or_is_an_exception(milestone: str, cls: type[Event]) -> None:
    """So a reader finds all that happened to a request, and all that it did to caches and pools."""
    has_requests = not ABOUT_REQUESTS.isdisjoint(field.name for field in dataclasses.fields(cls))
    exceptions = " ".join(WITHOUT_REQUEST.values()).split()
    assert has_requests == (cls.kind_name() not in exceptions)


def test_every_exception_is_an_event() -> None:
    kinds = {cls.kind_name() for milestone in MILESTONES for cls in event_classes(milestone)}
    assert set(" ".join(WITHOUT_REQUEST.values()).split()) <= kinds


@pytest.mark.parametrize("milestone", MILESTONES)
def test_every_field_of_an_event_is_documented_below_it(milestone: str) -> None:
    """A string right after the field: that is where the site's page of events takes it from."""
    for module in event_modules(milestone):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                assert ast.get_docstring(node), node.name
                assert undocumented(node) == [], node.name


def undocumented(definition: ast.ClassDef) -> list[str]:
    """The fields of a class without a string right below them."""
    return [
        ast.unparse(field.target)
        for field, below in pairwise([*definition.body, None])
        if isinstance(field, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(field.annotation)
        and not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    ]


# --- examples ---------------------------------------------------------------------------------------------------------


@each_example
def test_an_event_explains_itself_in_sentences_with_its_numbers(event: Event, words: list[str]) -> None:
    text = event.explain()
    assert re.match(r"[A-Z0-9']", text) or text.startswith(event.request_ids())
    assert text.endswith(".") and "\n" not in text and "  " not in text and "None" not in text
    for part in words:
        assert part in text


@each_example
def test_an_event_names_its_requests_whenever_it_speaks_for_itself(event: Event, words: list[str]) -> None:
    """A step may have many requests, and in the trace of one their events stand side by side.

    A batch of many shows them in other ways: it has a bar for each of them.
    """
    rids = event.request_ids()
    if len(rids) < 2 or not event.lanes():
        assert all(rid in event.explain() for rid in rids)
    brief = event.brief()
    assert brief is None or event.lanes() or all(rid in brief for rid in rids)


@each_example
def test_an_event_s_data_are_its_fields_as_plain_json(event: Event, words: list[str]) -> None:
    data = event.data()
    assert list(data) == [field.name for field in dataclasses.fields(event)]
    assert as_json(data) == as_json(dataclasses.asdict(event))


@each_example
def test_stable_data_leave_out_what_differs_between_machines_and_nothing_else(event: Event, words: list[str]) -> None:
    left_out = VOLATILE.get(event.kind, set())
    assert event.data(stable=True) == {name: value for name, value in event.data().items() if name not in left_out}


def as_json(data: Any) -> Any:
    """What is left of `data` when it is read back."""
    return json.loads(json.dumps(data))
