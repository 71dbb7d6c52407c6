"""How the router reaches its engines: as processes over a socket, or in this process, in turns.

The router knows this interface only. The one that stands here runs the engines itself, one tick each time it is asked
what came; so everything happens in one thread and in the same order every time: for tests, for the lesson, and to step
through with a debugger. `socket_links.py` and `processes.py` have the others.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from m1_single_request.errors import ConfigError, EngineDeadError, EngineError
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Fault, LengthFixed, Role, ToEngine, ToRouter
from m6_multimodal_pd.errors import PeerLostError


class Lost(NamedTuple):
    """An engine that is gone, and how that was noticed."""

    name: str
    why: str
    fault: Fault | None = None
    """Why another one in its place would be no better: it could not be built, or does not fit."""


class Links(Protocol):
    """Messages to and from engines, by name."""

    def send(self, name: str, message: ToEngine) -> None:
        """Queue a message. Raises `PeerLostError` for an engine that is gone, `WireError` for one that is too large."""
        ...

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """Yield the messages that have arrived; wait for the first of them, so long at most. Each is kept until the
        next one is asked for: after an interrupt while it was handled it comes again (`inbox.py`)."""
        ...

    def lost(self) -> Iterator[Lost]:
        """Yield engines that are gone since the last call. Kept in the same way."""
        ...

    def drop(self, name: str, why: str) -> None:
        """Give an engine up, whatever it still does; it is `lost`. Does nothing if it is gone."""
        ...

    def refuse(self, name: str, why: str) -> None:
        """Reject an engine that does not fit, and end it; it is not started anew."""
        ...

    def coming(self, role: str) -> bool:
        """Return whether an engine of this role is there, or will join."""
        ...

    def close(self) -> None:
        """End all engines."""
        ...


class LocalLinks:
    """Engines of this process."""

    def __init__(self, make: Callable[[Role, Callable[[ToRouter], None]], Engine]) -> None:
        """`make` builds an engine of a role; its second argument sends to the router."""
        self.make = make
        self.engines: dict[str, Engine] = {}
        self._to: dict[str, deque[ToEngine]] = {}
        self._from: deque[tuple[str, ToRouter]] = deque()
        self._lost: deque[Lost] = deque()

    def start(self, name: str, role: Role) -> None:
        """Build an engine, which joins once the length of requests is fixed."""
        arrived = self._from  # without cycles a group ends where its last user drops it

        def send(message: ToRouter) -> None:
            arrived.append((name, message))

        engine = self.make(role, send)
        self.engines[name], self._to[name] = engine, deque()
        send(engine.fitted)

    def send(self, name: str, message: ToEngine) -> None:
        """Queue a message for the engine's next tick."""
        if name not in self.engines:
            raise PeerLostError(f"there is no engine {name!r}")
        if isinstance(message, LengthFixed):
            self._complete(name, message.max_model_len)
        else:
            self._to[name].append(message)

    def _complete(self, name: str, max_model_len: int) -> None:
        """Let an engine join, or be lost if there is no memory for it."""
        engine = self.engines[name]
        try:
            engine.start(max_model_len)
        except EngineError as error:
            self.lose(name, str(error), fault_of(error))
        else:
            self._from.append((name, engine.joined))

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """One tick of each engine, and what they have said. One whose device is gone is lost."""
        for name, engine in [(name, engine) for name, engine in self.engines.items() if engine.core is not None]:
            try:
                engine.tick(self._to[name].popleft() for _ in range(len(self._to[name])))
            except EngineDeadError as error:
                self.lose(name, str(error))
        yield from handed_out(self._from)

    def lose(self, name: str, why: str, fault: Fault | None = None) -> None:
        """As if its process had ended."""
        self._lost.append(Lost(name, why, fault))
        self.engines.pop(name).close()
        del self._to[name]

    def drop(self, name: str, why: str) -> None:
        if name in self.engines:
            self.lose(name, why)

    def refuse(self, name: str, why: str) -> None:
        if name in self.engines:
            self.lose(name, why, fault_of(ConfigError(why)))

    def coming(self, role: str) -> bool:
        return any(engine.role == role for engine in self.engines.values())

    def lost(self) -> Iterator[Lost]:
        return handed_out(self._lost)

    def close(self) -> None:
        for name in list(self.engines):
            self.engines.pop(name).close()
