"""Base class of all trace events.

An event is a frozen dataclass with the numbers behind one decision. The readers of the trace use only this class: an
event returns the text for the console and the values for lanes and curves itself. So every reader can show the events
of every milestone. vLLM and SGLang log numbers and texts.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Matches the beginning of each word within a class name; capitals in a row are one word."""


def volatile() -> Any:
    """Return a field whose value differs between runs or machines."""
    return field(metadata={"volatile": True})


class Phase(NamedTuple):
    """A part of a step; its times are monotonic seconds, as those of a `TraceRecord`."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all events. An event implements `explain`, and overrides other methods where it has a value.

    Its sentences name the requests, because a step may have many.
    """

    style: ClassVar[str] = "default"
    """The console's colour."""
    detail: ClassVar[bool] = False
    """True: the verbose console indents it one level more."""
    headline: ClassVar[bool] = False
    """True: it belongs to no step, and both consoles show it in full."""
    ends_step: ClassVar[bool] = False
    """True: it is the last event of a step, and the readers show that step."""
    begins_bar: ClassVar[bool] = False
    """True: a later event of its step returns the length of a bar, which begins now or when its lane is free."""

    @classmethod
    def kind_name(cls) -> str:
        """Return the class name in snake case, such as `step_done` or `kv_usage`."""
        return WORD_BREAK.sub("_", cls.__name__).lower()

    @property
    def kind(self) -> str:
        """The name of its class, such as `step_done` or `kv_usage`."""
        return self.kind_name()

    def explain(self) -> str:
        """Return the event as one or two sentences with its numbers."""
        raise NotImplementedError

    def brief(self) -> str | None:
        """Return a few words for the step's line in the summary console, or None."""
        return None

    def request_ids(self) -> tuple[str, ...]:
        """Return the requests of the event: the value of its field `rids`, `rid` or `owner`, if it has one of these."""
        one = getattr(self, "rid", getattr(self, "owner", None))
        return tuple(getattr(self, "rids", () if one is None else (one,)))

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """Return the requests that have a bar for this step in the Chrome trace, each with the bar's label."""
        return ()

    def counters(self) -> dict[str, float]:
        """Return the new values of the Chrome trace's curves, by the curve's name."""
        return {}

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of the step that it ends, in order. There may be pauses between them."""
        return ()

    def bar(self) -> tuple[str, float] | None:
        """Return a lane and the milliseconds of a bar on it, or None. Negative: the bar ends where others begin."""
        return None

    def data(self, *, stable: bool = False) -> dict[str, Any]:
        """Return the fields as plain JSON values; without the volatile ones if `stable`."""
        kept = [f for f in fields(self) if not (stable and f.metadata.get("volatile"))]
        return {f.name: getattr(self, f.name) for f in kept}


def size(num_bytes: int) -> str:
    """Return a number of bytes as text, such as `96.0 KiB`."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"


def some(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 token`, `3 tokens` or `2 guesses`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
