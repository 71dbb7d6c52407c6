"""Preemption policies of tests: one that chooses in turn, and answers that name no running request."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

INVALID_VICTIMS: dict[str, Callable[[Any], Any]] = {
    "nobody": lambda running: None,
    "a stranger": lambda running: SimpleNamespace(request_id="stranger"),
    "an id": lambda running: running[0].request_id,
    "raises": lambda running: {}["victim"],
    "sorts in place": lambda running: running.sort(),
}


class InTurn:
    """Chooses another victim each time, so that sooner or later each is hit, in every state."""

    def __init__(self) -> None:
        self.count = 0

    def choose_victim(self, running: Any) -> Any:
        self.count += 1
        return running[self.count % len(running)]
