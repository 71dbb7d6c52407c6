"""m3 decoding beside a busy program.

Sides take turns, each in its own process: a quiet machine, and a machine on which another process spins without a
pause. Each decodes the same tokens, for one request and for sixteen at once, with the embedded checkpoint and with the
shape of Qwen3-0.6B. A ratio is the median of the ratios of its rounds.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.compare import measure, paired
from benchmarks.engines import EMBEDDED, MAX_MODEL_LEN, random_model
from benchmarks.lesson import SEED, Lesson, Row, Size

TOKENS = {"0.6B": {1: (64, 1), 16: (32, 1)}, "embedded": {1: (512, 4), 16: (256, 2)}}
"""For each model and number of requests: tokens of an answer, and number of runs."""


def rows(name: str, size: Size) -> Row:
    """Measure one model: a row of the table for each number of requests."""
    with TemporaryDirectory() as folder:
        model = EMBEDDED if name == "embedded" else random_model(Path(folder))
        config = {"model": str(model.directory), "dtype": model.dtype, "load_format": model.load_format}
        settings = {"model": config | {"device": "cpu", "max_model_len": MAX_MODEL_LEN, "seed": SEED}}
        spec = {"milestone": "m3", "settings": settings, "threads": torch.get_num_threads()}
        return {"rows": [row(name, spec, streams, size) for streams in TOKENS[name]]}


def row(name: str, spec: Row, streams: int, size: Size) -> Row:
    """Measure so many requests on a quiet machine and beside a busy program."""
    length, times = (8, 1) if size.quick else TOKENS[name][streams]
    work = {"number": streams, "prompts": (32, 32), "outputs": (length, length), "seed": SEED}
    sides, rounds = {"quiet": spec, "busy": spec | {"beside_busy": True}}, 1 if size.quick else size.rounds
    runs = measure(sides, {"drawn": work, "times": times}, rounds)
    found = paired(runs, lambda run: sum(map(len, run["times"])) / run["seconds"])
    found["busy_ratio"] = found.pop("ratio")
    return found | {"model": name, "streams": str(streams), "rounds": rounds}


LESSON = Lesson("m3_busy", lambda size: {name: partial(rows, name, size) for name in TOKENS}, rounds=15)
