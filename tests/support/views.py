"""What the tests of views share: events of a run, a view that reads them, and the text of a drawing."""

import io
from collections.abc import Iterable
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from m1_single_request.events import Event, RequestAdded, StepDone
from m1_single_request.output_events import Finish
from m1_single_request.trace_event import Phase
from m1_single_request.tracer import TraceReader, TraceRecord

View = TypeVar("View", bound=TraceReader)


def text_of(drawing: RenderableType, width: int = 100) -> str:
    """A drawing as text, without colours."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(drawing)
    file: Any = console.file
    return str(file.getvalue())


def added(rid: str, prompt_len: int = 6) -> RequestAdded:
    return RequestAdded(rid=rid, len=prompt_len, max_tokens=9, greedy=True, seed=0, num_waiting=0)


def ended(rid: str, out_len: int = 2) -> Finish:
    return Finish(rid=rid, reason="length", matched="max_tokens", why="enough", out_len=out_len)


def done() -> StepDone:
    return StepDone(
        num_tokens=1, num_waiting=0, num_running=0, kv_tokens=0, laps=(Phase("update", 0.0, 0.0),)
    )  # fmt: skip


def fed(view: View, *steps: Iterable[Event], first_step: int = 1) -> View:
    """The view, once it has read these events step by step."""
    for number, events in enumerate(steps, first_step):
        for event in (*events, done()):
            view.read(TraceRecord(number, 0.0, event))
    view.close()
    return view
