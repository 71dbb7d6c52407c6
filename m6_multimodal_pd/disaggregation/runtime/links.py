"""Links from the router to its engines: processes behind a socket, or engines of this process that run in turns.

The router uses this interface only. `LocalLinks`, below, runs the engines itself, one tick of each per `receive`; so
everything happens in one thread and in the same order in every run: for tests, for the lesson, and to step through with
a debugger. `socket_links.py` and `processes.py` have the links to other processes.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from m1_single_request.errors import ConfigError, EngineDeadError, EngineError
from m6_multimodal_pd.disaggregation.config import Role
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Fault, LengthFixed, ToEngine, ToRouter
from m6_multimodal_pd.errors import PeerLostError


class Lost(NamedTuple):
    """An engine that is gone, and the reason."""

    name: str
    why: str
    fault: Fault | None = None
    """Error of an engine that cannot be built or does not fit: another one in its place would have it, too."""


class Links(Protocol):
    """Messages to and from engines, by name."""

    def send(self, name: str, message: ToEngine) -> None:
        """Queue a message. Raises `PeerLostError` for an engine that is gone, `WireError` for one that is too large."""

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        """Return the messages that have arrived; wait at most `timeout_s` seconds for the first one."""

    def lost(self) -> list[Lost]:
        """Return the engines that are gone since the last call, and do what their end asks for: `ProcessLinks` removes
        what they leave, and starts others in their place."""

    def drop(self, name: str, why: str) -> None:
        """Give an engine up; `lost` may return it. Does nothing if it is gone."""

    def refuse(self, name: str, why: str) -> None:
        """Reject an engine that does not fit, and end it."""

    def wake(self) -> None:
        """End the wait of `receive`, called by another thread."""

    def coming(self, role: str) -> bool:
        """Return whether an engine of this role has joined, or will join without the user's help."""

    def close(self) -> None:
        """End all engines."""


class LocalLinks:
    """Engines of this process."""

    def __init__(self, make: Callable[[str, Role, Callable[[ToRouter], None]], Engine]) -> None:
        """`make` builds the engine of a name and role; its third argument sends to the router."""
        self.make = make
        self.engines: dict[str, Engine] = {}
        self._to: dict[str, list[ToEngine]] = {}
        self._from: list[tuple[str, ToRouter]] = []
        self._lost: list[Lost] = []

    def start(self, name: str, role: Role) -> None:
        """Build an engine, which joins once the length of requests is fixed."""
        arrived = self._from  # without cycles a group ends where its last user drops it

        def send(message: ToRouter) -> None:
            arrived.append((name, message))

        engine = self.make(name, role, send)
        self.engines[name], self._to[name] = engine, []
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
            self._from.append((name, engine.joined))
        except EngineError as error:
            self.drop(name, str(error), fault_of(error))

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        """Run one tick of each engine; return their messages. An engine whose device is gone is lost."""
        for name, engine in [(name, engine) for name, engine in self.engines.items() if engine.core is not None]:
            messages, self._to[name] = self._to[name], []
            try:
                engine.tick(messages)
            except EngineDeadError as error:
                self.drop(name, str(error))
        arrived = self._from[:]
        self._from.clear()
        return arrived

    def drop(self, name: str, why: str, fault: Fault | None = None) -> None:
        """Close an engine, as if its process had ended."""
        if name in self.engines:
            self._lost.append(Lost(name, why, fault))
            self.engines.pop(name).close()
            del self._to[name]

    def wake(self) -> None:
        """Do nothing: `receive` does not wait."""

    def refuse(self, name: str, why: str) -> None:
        self.drop(name, why, fault_of(ConfigError(why)))

    def coming(self, role: str) -> bool:
        return any(engine.role == role for engine in self.engines.values())

    def lost(self) -> list[Lost]:
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        for name in list(self.engines):
            self.engines.pop(name).close()
