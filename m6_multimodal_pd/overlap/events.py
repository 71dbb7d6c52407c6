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
    """The reason, as a clause."""

    @classmethod
    def of(cls, reason: str | None) -> Self | None:
        """Build the event for a reason; None if there is none."""
        return None if reason is None else cls(reason=reason)

    def explain(self) -> str:
        return f"Steps do not overlap: {self.reason}."


@dataclass(frozen=True, kw_only=True)
class StepLaunched(Event):
    """A step was launched."""

    style: ClassVar[str] = "cyan"
    begins_bar: ClassVar[bool] = True
    num_tokens: int
    """New tokens."""
    num_futures: int
    """Number of new tokens that were not known when the step was scheduled."""
    behind: int | None
    """The step before, which is booked after this launch. None: there is no such step."""
    waited_for: str | None
    """Reason, as a clause, why that step's tokens had to arrive before this launch; None: they arrive after it."""
    is_async: bool
    """Whether the device computes while the host goes on; otherwise the forward has ended at this event."""

    @classmethod
    def of(cls, forward: Any, behind: int | None) -> Self:
        """Build the event for a `ForwardOutput`."""
        return cls(
            num_tokens=len(forward.batch.input_ids),
            num_futures=forward.num_futures,
            behind=behind,
            waited_for=forward.waited_for,
            is_async=forward.is_async,
        )

    def explain(self) -> str:
        order = ""
        if self.behind is not None and self.waited_for is None:
            order = f" before the tokens of step {self.behind} have arrived"
        elif self.behind is not None:
            order = f" before step {self.behind} is booked, but after its tokens have arrived: {self.waited_for}"
        futures = "" if not self.num_futures else f" ({self.num_futures:,} of them unknown when it was scheduled)"
        state = "The device computes while the host goes on" if self.is_async else "It has ended already"
        return f"A step of {some(self.num_tokens, 'token')}{futures} is launched{order}. {state}."


@dataclass(frozen=True, kw_only=True)
class StepArrived(Event):
    """The host has waited for the end of a step, and has its tokens."""

    style: ClassVar[str] = "cyan"
    is_async: bool
    """As in `StepLaunched`."""
    device_ms: float = volatile()
    """Duration on the device, of the forward and of the choice of tokens if the device chooses them."""
    waited_ms: float = volatile()
    """Time that the host waited for its end."""

    @classmethod
    def of(cls, forward: Any) -> Self:
        """Build the event for a `ForwardOutput`."""
        device_ms, waited_ms = forward.device_seconds * 1e3, forward.waited_seconds * 1e3
        return cls(is_async=forward.is_async, device_ms=device_ms, waited_ms=waited_ms)

    def explain(self) -> str:
        hidden = max(self.device_ms - self.waited_ms, 0.0)
        return (
            f"The tokens have arrived: the device took {self.device_ms:.2f} ms. The host did other work for "
            f"{hidden:.2f} ms of that, and then waited for {self.waited_ms:.2f} ms."
        )

    def brief(self) -> str:
        return f"device {self.device_ms:.1f} ms, waited {self.waited_ms:.1f} ms"

    def bar(self) -> tuple[str, float]:
        return "device", self.device_ms if self.is_async else -self.device_ms
