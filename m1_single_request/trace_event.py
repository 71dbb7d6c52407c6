"""What every trace event can do, whichever milestone it belongs to.

An event is a frozen dataclass with the numbers behind one decision. The readers of the trace know no other class than
`Event`: what a console line, a lane or a curve shows of an event, the event itself says. So a milestone's `events.py`
derives its events from this one, and every reader understands them at once. vLLM and SGLang log numbers and texts.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word begins within a class name; capitals in a row are one word."""


def volatile() -> Any:
    """A field whose value differs between runs or machines."""
    return field(metadata={"volatile": True})


@dataclass(frozen=True, kw_only=True)
class Event:
    """The root of all events. Every event has its `explain`; of the rest it overrides what it has something to say to.

    Its sentences name the requests: a step may have many.
    """

    style: ClassVar[str] = "default"
    """The console's colour."""
    detail: ClassVar[bool] = False
    """Whether the verbose console shows it one level deeper."""
    headline: ClassVar[bool] = False
    """Whether it stands above all steps: both consoles say it in full."""
    ends_step: ClassVar[bool] = False
    """Whether a step is over with it: the readers then show what they have gathered of the step."""

    @property
    def kind(self) -> str:
        """The class name in snake case: `step_done`, `kv_usage`."""
        return WORD_BREAK.sub("_", type(self).__name__).lower()

    def explain(self) -> str:
        """One or two sentences with the numbers in them."""
        raise NotImplementedError

    def brief(self) -> str | None:
        """The few words about it in the summary console's line of the step; None: nothing."""
        return None

    def request_ids(self) -> tuple[str, ...]:
        """The requests that it is about: what its field `rids`, `rid` or `owner` names, if it has one of these."""
        one = getattr(self, "rid", getattr(self, "owner", None))
        return tuple(getattr(self, "rids", () if one is None else (one,)))

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """The requests that have a bar for this step in the Chrome trace, each with the bar's label."""
        return ()

    def counters(self) -> dict[str, float]:
        """Values of the Chrome trace's curves from now on, by the curve's name."""
        return {}

    def phases(self) -> dict[str, float]:
        """If it ends a step: where the step's time went, in milliseconds, in order."""
        return {}

    def data(self, *, stable: bool = False) -> dict[str, Any]:
        """The fields as plain JSON values; without the volatile ones if `stable`."""
        kept = [f for f in fields(self) if not (stable and f.metadata.get("volatile"))]
        return {f.name: getattr(self, f.name) for f in kept}


def size(num_bytes: int) -> str:
    """A number of bytes for people: `96.0 KiB`."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"


def some(count: int, noun: str) -> str:
    """`1 token`, `3 tokens`; `2 guesses`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
