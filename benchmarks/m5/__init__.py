"""The measurements of lesson 5: `python -m benchmarks m5`."""

from collections.abc import Callable
from typing import Any

from benchmarks import lesson
from benchmarks.engines import Engines
from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.m3 import on_model

MAX_MODEL_LEN = 2048
BUDGETS, TARGETS_MS = (32, 64, 92, 96, 128, 256, 512, 1024), (6.0, 8.0, 9.0, 10.0, 11.0, 12.0, 24.0)


def parts(size: Size) -> Parts:
    """Return everything that is measured, by name, in this order."""
    from benchmarks.m5 import gaps, recording, scheduling, speculation
    from benchmarks.streams import Traffic

    def on(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: on_model(run, max_model_len=MAX_MODEL_LEN)

    traffic = Traffic(stream_tokens=36, prompt_tokens=200) if size.quick else Traffic()
    budgets, targets = ((32, 128), (12.0,)) if size.quick else (BUDGETS, TARGETS_MS)
    number = 2 if size.quick else 8
    return {
        "gaps": on(lambda e: gaps.by_budget(e, traffic, budgets, targets, 2 * size.rounds - 1)),
        "speculation": on(lambda e: speculation.speculation(e, number=number, batches=(1, 8), rounds=size.rounds)),
        "scheduling": lambda: scheduling.schedule(50 if size.quick else 400),
        "steps": on(recording.steps),
        "origins": on(recording.origins),
    }


LESSON = Lesson(
    "m5_chunked_prefill_spec", parts, environment=lambda quick: lesson.backend() | {"draft_model": "tiny-qwen3-draft"}
)
