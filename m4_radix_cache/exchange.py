"""What a scheduler of a living batch gets from other engines, and hands on to them: nothing before m6.

A request may be known to a scheduler and be in none of its queues and batches, because it waits for another engine, or
another engine for it. Who that is and why is told to the scheduler by one collaborator; the one that stands here knows
nobody. m6 lets one engine compute prompts and another one answer them. SGLang: the queues of `disaggregation/`, which
are attributes of its `Scheduler`.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from m4_radix_cache.request import Req


class Exchange(Protocol):
    """Requests that are elsewhere. It may hold rows for them; none of them waits or runs."""

    def held(self) -> Iterable[Req]:
        """All of them, in order of arrival."""
        ...

    def holds(self, req: Req) -> bool:
        """Whether this request is one of them."""
        ...

    def takes_in(self, req: Req) -> bool:
        """Whether a request that arrives is to be one of them, and not to wait here. If so, it is from now on."""
        ...

    def keeps(self, req: Req) -> bool:
        """Whether a request that got a token in this step, and has KV for all others, is one of them from now on."""
        ...

    def arrived(self) -> Any:
        """A batch of those that are here now and join those who run; None: nobody has come."""
        ...

    def let_go(self, req: Req) -> None:
        """One of them has ended, or its KV is lost. Its row, if it has one, is given back by whoever calls this."""
        ...


class NoExchange:
    """There are no other engines."""

    def held(self) -> Iterable[Req]:
        """Nobody."""
        return ()

    def holds(self, req: Req) -> bool:
        """Nobody is."""
        return False

    def takes_in(self, req: Req) -> bool:
        """It waits here."""
        return False

    def keeps(self, req: Req) -> bool:
        """It runs on here."""
        return False

    def arrived(self) -> Any:
        """Nobody comes."""
        return None

    def let_go(self, req: Req) -> None:
        """Nothing to forget."""
