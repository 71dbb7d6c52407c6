"""A decode step in the normal order with one thread and with two, and overlapped with one compute thread.

The caller only calls `step()`. A step in flight is booked by the next call, so between the first call and the last each
call is one step in all three ways. What the host does in a step is the time of the normal order with one thread, less
the time that the C++ kernels take: schedule, inputs, logits, sampling, booking. The time of the kernels is read from
the trace of overlapped steps. A reader costs host time, so these steps are measured apart, in the same rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch

from benchmarks import BenchmarkError
from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.metrics import METRICS, compared, summary
from benchmarks.serving import prepared
from benchmarks.timing import in_turns
from benchmarks.workloads import tokens
from m1_single_request.events import StepDone
from m1_single_request.trace_readers import Records
from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.overlap.events import StepArrived

NORMAL, OVERLAPPED, BOTH_CORES = "normal, 1 thread", "overlapped, 1 compute thread", "normal, 2 threads"
TRACED = "overlapped, traced"
PROMPT_TOKENS, PAGE_SIZE = 10, 16
FIRST_STEPS = 3
"""Decode steps before the measured ones."""
LAST_TOKENS = 3
"""Tokens after the measured ones: so none of those steps is the last one, and in each another step is launched."""


class Decoded(NamedTuple):
    """One run: medians over its steps in seconds, and the tokens of all answers."""

    step: float
    answers: list[list[int]]
    device: float
    """Of the kernels, and 0 in a run that is not traced."""
    sample: float
    """Of logits and sampling, and 0 in a run that is not traced."""


def step_seconds(engine: Any, num_steps: int, batch: int) -> list[float]:
    """Make steps, and return the seconds of each. Each must give all requests a token."""
    numbers, times = [], [time.perf_counter()]
    for _ in range(num_steps):
        numbers.append(len(engine.step()))
        times.append(time.perf_counter())
    assert set(numbers) == {batch}, f"steps with {sorted(set(numbers))} outputs"
    return [after - before for before, after in pairwise(times)]


def decoded(engine: Any, threads: int, prompts: Sequence[list[int]], num_steps: int, traced: bool = False) -> Decoded:
    """Answer the prompts, all at once, and measure `num_steps` steps in their middle."""
    torch.set_num_threads(threads)
    prepared(engine, flush=True)
    params, outputs = SamplingParams(max_tokens=answer_tokens(num_steps), ignore_eos=True), dict[str, Any]()
    rids = [engine.add_request(prompt, params) for prompt in prompts]
    while len(outputs) < len(rids):  # until all of them decode
        outputs |= engine.step()
    step_seconds(engine, FIRST_STEPS, len(rids))
    records = Records()
    if traced:
        engine.tracer.attach(records)
    seconds = step_seconds(engine, num_steps, len(rids))
    if traced:
        engine.tracer.detach(records)
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    device = statistics.median([event.device_ms / 1e3 for _, event in records.of(StepArrived)] or [0.0])
    sample = statistics.median([event.sample_ms / 1e3 for _, event in records.of(StepDone)] or [0.0])
    return Decoded(statistics.median(seconds), [list(outputs[rid].token_ids) for rid in rids], device, sample)


def answer_tokens(num_steps: int) -> int:
    """Return the length of an answer whose first token is its prompt's."""
    return FIRST_STEPS + num_steps + LAST_TOKENS


def steps(engines: Engines, batches: Sequence[int], num_steps: int, rounds: int) -> Row:
    """Measure decode steps of these numbers of requests. Raises `BenchmarkError` where steps cannot overlap."""
    return {"steps": num_steps, "rounds": rounds, "rows": [row(engines, size, num_steps, rounds) for size in batches]}


def row(engines: Engines, batch: int, num_steps: int, rounds: int) -> Row:
    """Measure decode steps of `batch` requests in all ways, in turns."""
    pages = -(-(PROMPT_TOKENS + answer_tokens(num_steps)) // PAGE_SIZE) + 1
    cache = {"page_size": PAGE_SIZE, "max_total_tokens": batch * pages * PAGE_SIZE}
    limits = {"max_num_seqs": batch, "max_num_batched_tokens": batch * PAGE_SIZE}  # all prompts are one step
    normal, overlapped = (
        engines("m6", scheduler=limits | {"enable_overlap": overlap}, cache=cache) for overlap in (False, True)
    )
    if (reason := overlapped.engine_core.obstacle) is not None:
        raise BenchmarkError(f"steps do not overlap here: {reason}")
    rng = Random(SEED)
    prompts = [tokens(rng, PROMPT_TOKENS) for _ in range(batch)]

    def way(engine: Any, threads: int, traced: bool = False) -> Callable[[], Decoded]:
        return lambda: decoded(engine, threads, prompts, num_steps, traced)

    ways = {NORMAL: way(normal, 1), OVERLAPPED: way(overlapped, 1), BOTH_CORES: way(normal, 2)}
    runs = in_turns(ways | {TRACED: way(overlapped, 1, traced=True)}, rounds=rounds)
    return {"requests": batch} | compared_ways(runs)


def compared_ways(runs: dict[str, list[Decoded]]) -> Row:
    """Return medians of all ways, their ratios round by round, the share of the host's time that is hidden, and whether
    the tokens are the same."""
    seconds = {name: [run.step for run in own] for name, own in runs.items()}
    traced = runs[TRACED]
    device = [run.device for run in traced]
    host = statistics.median(a - d for a, d in zip(seconds[NORMAL], device, strict=True))
    saved = [a - b for a, b in zip(seconds[NORMAL], seconds[OVERLAPPED], strict=True)]
    metric, answers = METRICS["gap between tokens, median"], runs[NORMAL][0].answers
    return {
        "sides": {name: statistics.median(seconds[name]) for name in (NORMAL, OVERLAPPED, BOTH_CORES)},
        "seconds": seconds,
        "device": statistics.median(device),
        "sample": statistics.median(run.sample for run in traced),
        "host": host,
        "hidden": summary([value / host for value in saved]),
        "of_normal": compared(metric, seconds[OVERLAPPED], seconds[NORMAL]),
        "of_both_cores": compared(metric, seconds[OVERLAPPED], seconds[BOTH_CORES]),
        "same_tokens": all(run.answers == answers for own in runs.values() for run in own),
    }
