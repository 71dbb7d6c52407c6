"""Events of overlapped steps: launched, arrived, and why steps do not overlap.

An event belongs to its own step, so step numbers go back by one where step N is booked after step N + 1 was launched.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some, volatile


@dataclass(frozen=True, kw_only=True)
class NormalOrder(Event):
    """Steps run one after the other, although the configuration lets them overlap."""

    style: ClassVar[str] = "yellow"
    headline: ClassVar[bool] = True
    reason: str

    @classmethod
    def of(cls, reason: str | None) -> Self | None:
        """Build the event for a reason; None if there is none."""
        return None if reason is None else cls(reason=reason)

    def explain(self) -> str:
        return f"Steps do not overlap: {self.reason}."


@dataclass(frozen=True, kw_only=True)
class StepLaunched(Event):
    """The forward of a step was started."""

    style: ClassVar[str] = "cyan"
    num_tokens: int
    """New tokens."""
    num_futures: int
    """Those among them that were not known when the step was scheduled."""
    behind: int | None
    """The step that was in flight then, and is not booked yet."""
    is_async: bool
    """Whether the device computes while the host goes on; otherwise the forward has ended at this event."""

    @classmethod
    def of(cls, forward: Any, behind: int | None) -> Self:
        """Build the event for a `ForwardOutput`."""
        num_tokens = len(forward.batch.input_ids)
        return cls(num_tokens=num_tokens, num_futures=forward.num_futures, behind=behind, is_async=forward.is_async)

    def explain(self) -> str:
        where = "The device computes it now" if self.is_async else "It was computed within the call"
        if self.behind is None:
            return f"Launched: {some(self.num_tokens, 'token')}. {where}."
        return (
            f"Launched before step {self.behind} is booked: {some(self.num_tokens, 'token')}, of which "
            f"{self.num_futures} were placeholders when the step was scheduled. {where}."
        )


@dataclass(frozen=True, kw_only=True)
class StepArrived(Event):
    """The forward of a step has ended, and its tokens are sampled."""

    style: ClassVar[str] = "cyan"
    device_ms: float = volatile()
    """Duration of the forward on the device."""
    waited_ms: float = volatile()
    """Time that the host waited for its end."""

    @classmethod
    def of(cls, forward: Any) -> Self:
        """Build the event for a `ForwardOutput`."""
        return cls(device_ms=forward.device_seconds * 1e3, waited_ms=forward.waited_seconds * 1e3)

    def explain(self) -> str:
        hidden = max(self.device_ms - self.waited_ms, 0.0)
        return (
            f"Arrived: the forward took {self.device_ms:.2f} ms. The host did other work for {hidden:.2f} ms of that, "
            f"and then waited for {self.waited_ms:.2f} ms."
        )
