"""The measurements of lesson 6, part 1, images: `python -m benchmarks m6`. Part 2: `m6_pd`; part 3: `m6_overlap`."""

from collections.abc import Callable
from typing import Any

from benchmarks import lesson
from benchmarks.engines import SEEING, SEEING_MODEL, Engines
from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.m3 import on_model

UNLIMITED = 2**20
NUMBERS, BUDGETS = (1, 2, 4, 8, 16), (64, 128, 256, 512, UNLIMITED)


def parts(size: Size) -> Parts:
    """Return everything that is measured, by name, in this order."""
    from benchmarks.m6 import answers, beside, reading

    def on(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: on_model(run, SEEING, max_model_len=2048)

    numbers, budgets = ((1, 4), (64, UNLIMITED)) if size.quick else (NUMBERS, BUDGETS)
    num_requests, num_steps, stream_tokens = (4, 20, 40) if size.quick else (16, 200, 100)
    num_pictures, every = (1, 100) if size.quick else (2, 500)
    return {
        "memory": on(answers.memory),
        "answers": on(lambda e: answers.answers(e, rounds=4 * size.rounds - 1)),
        "tower": on(lambda e: answers.tower(e, numbers, rounds=2 * size.rounds - 1)),
        "gaps": on(lambda e: beside.gaps(e, budgets, rounds=size.rounds, stream_tokens=stream_tokens)),
        "steps": on(lambda e: beside.steps(e, num_requests, num_steps)),
        "reading": on(lambda e: reading.reading(e, num_pictures, every, rounds=size.rounds)),
    }


LESSON = Lesson("m6_multimodal", parts, model=SEEING_MODEL, environment=lesson.backend)
