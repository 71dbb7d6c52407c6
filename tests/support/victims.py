"""Preemption policies of tests, answers that name no running request, and a step that fails when a victim has left."""

from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput
from tests.support.engines import check_begun, greedy

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


def failing_when_somebody_leaves(num_lost: Callable[[], int], error: Exception, at: str) -> type[GPUExecutor]:
    """An executor whose step fails once: `before` or `after` it ran, when a request has lost its place."""

    class FailsWhenSomebodyLeaves(GPUExecutor):
        left = 1

        def execute_model(self, work: Any) -> ModelRunnerOutput:
            if self.left and num_lost() and work.num_scheduled_tokens:
                self.left = 0
                if at == "after":
                    super().execute_model(work)
                raise error
            return super().execute_model(work)

    return FailsWhenSomebodyLeaves


def check_some_failed(outputs: Mapping[str, Any], alone: Any) -> None:
    """Of requests `n` with the prompts `[5 + n, 9]` some failed and some did not; what they said is right."""
    reasons = Counter(output.finish_reason for output in outputs.values())
    assert reasons["error"] >= 1 and reasons["length"] >= 1
    for rid, output in outputs.items():
        check_begun(output, alone.generate([5 + int(rid), 9], greedy(9)))
