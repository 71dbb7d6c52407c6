"""Large pictures beside a stream: its longest gap while they are read by the call that adds them, or by a process.

A gap is the time between two tokens of the stream: the call that adds a request, if one arrives, and a step. Steps that
compute the prompt of a picture are longer on either side, and are listed apart: chunks and the encoder's budget limit
them (`gaps` in `beside.py`), and they have nothing to do with reading.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.engines import Engines
from benchmarks.lesson import Row
from benchmarks.m6.answers import QUESTION
from benchmarks.timing import in_turns
from m6_multimodal_pd import SamplingParams

SIZE = (5472, 3648)
"""Width and height of a picture: 20 megapixels."""
CELL = 8
"""Pixels of the picture along a side of one number of its noise."""
ANSWER = 4
"""Tokens of the answer to a picture."""
SIDES = {"in the call": 0, "1 process": 1}
"""Media processes by name."""


@dataclass(frozen=True)
class Gap:
    """One token of the stream later."""

    call: float
    """Seconds of the call that adds a request; 0 if none arrives."""
    step: float
    """Seconds of the step."""
    computes_prompt: bool
    """Whether the step computes tokens of a picture's prompt."""


@contextmanager
def photographs(number: int) -> Iterator[tuple[list[Path], int]]:
    """Write JPEG files of smooth noise; yield their paths, and the size of the largest in bytes."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{index}.jpg" for index in range(number)]
        for index, path in enumerate(paths):
            noise = np.random.default_rng(index).integers(0, 256, (SIZE[1] // CELL, SIZE[0] // CELL, 3), dtype=np.uint8)
            Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC).save(path, quality=90)
        yield paths, max(path.stat().st_size for path in paths)


def gaps_of(engine: Any, paths: Sequence[Path], every: int) -> list[Gap]:
    """Return the gaps of a stream, beside which a picture arrives every so many tokens. If it ends before the last
    picture is answered, another stream follows."""
    assert engine.flush_cache()
    arrivals = [[{"role": "user", "content": [{"type": "image", "image": path}, _text(QUESTION)]}] for path in paths]
    question = engine.chat_prompt([{"role": "user", "content": [_text(QUESTION)]}])
    params = SamplingParams(max_tokens=every * (len(paths) + 1), ignore_eos=True)
    stream, unanswered = engine.add_request(question, params), set[str]()
    while not engine.step():  # its first token
        pass
    found: list[Gap] = []
    computed = engine.stats().num_prompt_tokens
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        if arrivals and len(found) % every == every - 1:
            answer = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            unanswered.add(engine.add_request(arrivals.pop(0), answer))
        added = time.perf_counter()
        outputs = engine.step()
        ended, before = time.perf_counter(), computed
        computed = engine.stats().num_prompt_tokens
        found.append(Gap(added - began, ended - added, computed > before))
        assert all(output.error is None for output in outputs.values())
        unanswered -= {rid for rid, output in outputs.items() if output.finished}
        if stream in outputs and outputs[stream].finished and unanswered:
            stream = engine.add_request(question, params)
    return found


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def reading(engines: Engines, num_pictures: int, every: int, *, rounds: int) -> Row:
    """Measure the gaps of a stream with one and with two threads, without pictures and on both sides."""
    default, sides = torch.get_num_threads(), dict[str, Any]()
    made = {name: engines("m6", multimodal={"num_media_processes": number}) for name, number in SIDES.items()}

    def run(threads: int, name: str, paths: Sequence[Path]) -> list[Gap]:
        torch.set_num_threads(threads)
        return gaps_of(made[name], paths, every if paths else every * (num_pictures + 1))

    with photographs(num_pictures) as (paths, num_bytes):
        try:
            for threads in (1, 2):
                sides[f"{threads}, no picture"] = partial(run, threads, "in the call", [])
                sides |= {f"{threads}, {name}": partial(run, threads, name, paths) for name in SIDES}
            found = in_turns(sides, rounds=rounds)
        finally:
            torch.set_num_threads(default)
    rows = {name: summary(own) for name, own in found.items()}
    traffic = {"pictures": num_pictures, "size": SIZE, "bytes": num_bytes, "every": every, "rounds": rounds}
    return {"traffic": traffic, "sides": rows}


def summary(rounds: Sequence[Sequence[Gap]]) -> Row:
    """Return medians over the rounds, in seconds: of the median step, of the longest step without a picture's prompt,
    of the longest call, of the longest gap without such a prompt, and of the longest step with one."""
    found: dict[str, list[float]] = {}
    for gaps in rounds:
        plain = [gap for gap in gaps if not gap.computes_prompt]
        values = {
            "median": statistics.median(gap.step for gap in gaps),
            "longest_step": max(gap.step for gap in plain),
            "longest_call": max(gap.call for gap in gaps),
            "longest_gap": max(gap.call + gap.step for gap in plain),
            "longest_prompt_step": max((gap.step for gap in gaps if gap.computes_prompt), default=0.0),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    row = {name: statistics.median(values) for name, values in found.items()}
    return row | {"times_median": row["longest_step"] / row["median"], "longest_steps": found["longest_step"]}
