"""How the router reaches its engines: as processes over a socket, or in this process, in turns.

The router knows this interface only. The one that stands here runs the engines itself, one tick each time it is asked
what came; so everything happens in one thread and in the same order every time: for tests, for the lesson, and to step
through with a debugger. `processes.py` has the other one.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from m1_single_request.errors import ConfigError, EngineDeadError
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.jobs import fault_of
from m6_multimodal_pd.disaggregation.messages import Fault, ToEngine, ToRouter
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

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        """What has come; waits for the first of it, so long at most."""
        ...

    def lost(self) -> list[Lost]:
        """Engines that are gone since the last time, each once."""
        ...

    def drop(self, name: str, why: str) -> None:
        """Give an engine up, whatever it still does; it is `lost`. Nothing happens if it is gone."""
        ...

    def refuse(self, name: str, why: str) -> None:
        """Let an engine that has joined know that it does not fit, and end it; it is not started anew."""
        ...

    def coming(self, role: str) -> bool:
        """Whether an engine of this role is there, or will join."""
        ...

    def close(self) -> None:
        """End all engines."""
        ...


class LocalLinks:
    """Engines of this process."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self._to: dict[str, deque[ToEngine]] = {}
        self._from: deque[tuple[str, ToRouter]] = deque()
        self._lost: list[Lost] = []

    def add(self, name: str, make: Callable[[Callable[[ToRouter], None]], Engine]) -> None:
        """An engine joins. `make` is told how it speaks to the router."""

        def send(message: ToRouter) -> None:
            self._from.append((name, message))

        engine = make(send)
        self.engines[name], self._to[name] = engine, deque()
        send(engine.joined)

    def send(self, name: str, message: ToEngine) -> None:
        """Queue a message for the engine's next tick."""
        if name not in self.engines:
            raise PeerLostError(f"there is no engine {name!r}")
        self._to[name].append(message)

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        """One tick of each engine, and what they have said. One whose device is gone is lost."""
        for name, engine in list(self.engines.items()):
            messages, self._to[name] = self._to[name], deque()
            try:
                engine.tick(messages)
            except EngineDeadError as error:
                self.lose(name, str(error))
        came, self._from = list(self._from), deque()
        return came

    def lose(self, name: str, why: str, fault: Fault | None = None) -> None:
        """As if its process had ended."""
        self.engines.pop(name).close()
        del self._to[name]
        self._lost.append(Lost(name, why, fault))

    def drop(self, name: str, why: str) -> None:
        if name in self.engines:
            self.lose(name, why)

    def refuse(self, name: str, why: str) -> None:
        self.lose(name, why, fault_of(ConfigError(why)))

    def coming(self, role: str) -> bool:
        return any(engine.role == role for engine in self.engines.values())

    def lost(self) -> list[Lost]:
        found, self._lost = self._lost, []
        return found

    def close(self) -> None:
        for name in list(self.engines):
            self.engines.pop(name).close()
