"""Event of priority preemption: the requests that lose their places, the one that takes them, and the arithmetic.

`Retract` of `events.py` is the other way to lose a place. SGLang logs a line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from m1_single_request.trace_event import Event, some
from m4_radix_cache.request import Req


@dataclass(frozen=True, kw_only=True)
class Preempt(Event):
    """A request of higher priority had no room, and took the place of running requests, which wait again."""

    style: ClassVar[str] = "bold yellow"
    rids: tuple[str, ...]
    """Id of the new request, then those of the preempted ones, in the order in which they were chosen."""
    priorities: tuple[int, ...]
    """Priority of each."""
    threshold: int
    """The priorities of the preempted requests are lower by more than this."""
    token_counts: tuple[int, ...]
    """Tokens with KV of each preempted request; it computes them again, except those that stay cached."""
    need: int
    """Tokens that the new request takes now or may take later."""
    before: int
    """Tokens that were neither taken nor reserved. If they exceed `need`, a row was missing, or the prefix of the new
    request is among them."""
    after: int
    """Tokens that are neither taken nor reserved after the preemption."""

    @classmethod
    def of(
        cls, req: Req, victims: Sequence[tuple[Req, int]], threshold: int, need: int, before: int, after: int
    ) -> Self:
        """Build the event for a new request, and the preempted ones, each with its number of tokens with KV."""
        reqs = [req, *(victim for victim, _ in victims)]
        return cls(
            rids=tuple(one.rid for one in reqs),
            priorities=tuple(one.priority for one in reqs),
            threshold=threshold,
            token_counts=tuple(count for _, count in victims),
            need=need,
            before=before,
            after=after,
        )

    def brief(self) -> str:
        return f"preempted for {self.rids[0]}: {', '.join(self.rids[1:])}"

    def explain(self) -> str:
        counted = zip(self.rids[1:], self.priorities[1:], self.token_counts, strict=True)
        victims = ", ".join(
            f"{rid} (priority {priority:,}, {some(count, 'token')})" for rid, priority, count in counted
        )
        return (
            f"{self.rids[0]} of priority {self.priorities[0]:,} may need {some(self.need, 'slot')} and has no room: "
            f"{self.before:,} are neither taken nor reserved, or no row is free. It preempts {victims}, because its "
            f"priority is higher by more than {self.threshold:,}. Then {self.after:,} are neither taken nor reserved. "
            f"A preempted request keeps its output and waits at its own priority; what is cached of it is not computed "
            f"again."
        )
