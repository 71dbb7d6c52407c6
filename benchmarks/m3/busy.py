"""m3 decoding beside a busy program.

Sides take turns, each in its own process: a quiet machine, and a machine on which another process spins without a
pause. Each decodes the same tokens, for one request and for sixteen at once, with the embedded checkpoint and with the
shape of Qwen3-0.6B. A ratio is the median of the ratios of its rounds.
"""

import hashlib
import statistics
from pathlib import Path
from typing import Any

from benchmarks import lesson
from benchmarks.engines import EMBEDDED, MAX_MODEL_LEN, random_model
from benchmarks.lesson import SEED, Lesson, Size
from benchmarks.side import Side
from benchmarks.timing import ratio

STREAMS = (1, 16)
TOKENS = {"0.6B": {1: (64, 1), 16: (32, 1)}, "embedded": {1: (512, 4), 16: (256, 2)}}
"""For each model and number of requests: tokens of an answer, and number of runs."""
Row = dict[str, Any]


def measure(name: str, size: Size) -> Row:
    """Measure one model, each side in its own process."""
    return lesson.in_folder(
        lambda folder: {"rows": rows_of(name, rounds := _rounds(name, size, folder)), "rounds": rounds}
    )


def _rounds(name: str, size: Size, folder: Path) -> list[Row]:
    model = EMBEDDED if name == "embedded" else random_model(folder)
    config = {"model": str(model.directory), "dtype": model.dtype, "load_format": model.load_format, "device": "cpu"}
    spec = {"milestone": "m3", "settings": {"model": config | {"max_model_len": MAX_MODEL_LEN, "seed": SEED}}}
    found = []
    with Side(spec) as quiet, Side(spec | {"beside_busy": True}) as busy:
        sides = {"quiet": quiet, "busy": busy}
        for number in range(1 if size.quick else size.rounds):
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]  # no side is always the first one
            found.append({side: speeds(sides[side], name, size.quick) for side in order})
    return found


def speeds(side: Side, name: str, quick: bool) -> Row:
    """Return tokens per second for each number of requests."""
    found: Row = {}
    for streams, (length, times) in TOKENS[name].items():
        length = 8 if quick else length
        work = {"number": streams, "prompts": (32, 32), "outputs": (length, length), "seed": SEED}
        side({"drawn": work, "shortened": 4})
        run = side({"drawn": work, "times": times})
        tokens = times * streams * length
        found[str(streams)] = {
            "tokens": tokens,
            "tokens_per_second": tokens / run["seconds"],
            "answers": hashlib.sha256(repr(run["answers"]).encode()).hexdigest()[:16],
            "other_cores": run["load"]["other_cores"],
        }
    return found


def rows_of(name: str, rounds: list[Row]) -> list[Row]:
    """Return a row of the table for each number of requests."""
    rows = []
    for streams in map(str, STREAMS):
        quiet, busy = ([each[side][streams]["tokens_per_second"] for each in rounds] for side in ("quiet", "busy"))
        answers = {each[side][streams]["answers"] for each in rounds for side in each}
        rows.append(
            {
                "model": name,
                "streams": streams,
                "quiet": statistics.median(quiet),
                "busy": statistics.median(busy),
                "busy_ratio": ratio(busy, quiet),
                "rounds": len(rounds),
                "same_answers": len(answers) == 1,
            }
        )
    return rows


LESSON = Lesson("m3_busy", lambda size: {name: lambda name=name: measure(name, size) for name in TOKENS}, rounds=15)
