"""A decode step in the normal order with one thread and with two, and overlapped with one compute thread.

The caller only calls `step()`. A step in flight is booked by the next call, so between the first call and the last each
call is one step in all three ways. A step of `s` seconds in which the device computes for `d` and the host waits for
`w` leaves `s - w` for the work of the host, and `s - d` of that without the device beside it: the rest is hidden.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.overlap.launcher import ForwardOutput

NORMAL, OVERLAPPED, BOTH_CORES = "normal, 1 thread", "overlapped, 1 compute thread", "normal, 2 threads"
PROMPT_TOKENS, PAGE_SIZE = 10, 16
FIRST_STEPS = 3
"""Decode steps before the measured ones."""
LAST_TOKENS = 3
"""Tokens after the measured ones: so none of those steps is the last one, and in each another step is launched."""


class Decoded(NamedTuple):
    """One run: the median of its steps in seconds, and the tokens of all answers."""

    step: float
    answers: list[list[int]]
    mean: float
    """Mean of its steps in seconds."""
    device: float
    """Mean time of the device in a step; 0 in the normal order."""
    waited: float
    """Mean time that the host waited for it; 0 in the normal order."""

    @property
    def hidden(self) -> float:
        """Share of the host's work that was done while the device computed."""
        return (min(self.device, self.mean) - self.waited) / (self.mean - self.waited)


@contextmanager
def arrivals(engine: Any) -> Iterator[list[ForwardOutput]]:
    """Collect the steps that arrive; none in the normal order."""
    launcher, found = getattr(engine.engine_core, "launcher", None), list[ForwardOutput]()
    if launcher is None:
        yield found
        return
    original = launcher.arrive

    def arrive(launched: ForwardOutput) -> None:
        original(launched)
        found.append(launched)

    launcher.arrive = arrive
    try:
        yield found
    finally:
        launcher.arrive = original


def step_seconds(engine: Any, num_steps: int, batch: int) -> list[float]:
    """Make steps, and return the seconds of each. Each must give all requests a token."""
    numbers, times = [], [time.perf_counter()]
    for _ in range(num_steps):
        numbers.append(len(engine.step()))
        times.append(time.perf_counter())
    assert set(numbers) == {batch}, f"steps with {sorted(set(numbers))} outputs"
    return [after - before for before, after in pairwise(times)]


def decoded(engine: Any, threads: int, prompts: Sequence[list[int]], num_steps: int) -> Decoded:
    """Answer the prompts, all at once, and measure `num_steps` steps in their middle."""
    torch.set_num_threads(threads)
    prepared(engine, flush=True)
    params, outputs = SamplingParams(max_tokens=answer_tokens(num_steps), ignore_eos=True), dict[str, Any]()
    rids = [engine.add_request(prompt, params) for prompt in prompts]
    while len(outputs) < len(rids):  # until all of them decode
        outputs |= engine.step()
    step_seconds(engine, FIRST_STEPS, len(rids))
    with arrivals(engine) as arrived:
        seconds = step_seconds(engine, num_steps, len(rids))
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    return Decoded(
        statistics.median(seconds),
        [list(outputs[rid].token_ids) for rid in rids],
        statistics.mean(seconds),
        statistics.mean([step.device_seconds for step in arrived] or [0.0]),
        statistics.mean([step.waited_seconds for step in arrived] or [0.0]),
    )


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

    def way(engine: Any, threads: int) -> Callable[[], Decoded]:
        return lambda: decoded(engine, threads, prompts, num_steps)

    ways = {NORMAL: way(normal, 1), OVERLAPPED: way(overlapped, 1), BOTH_CORES: way(normal, 2)}
    return {"requests": batch} | compared_ways(in_turns(ways, rounds=rounds))


def compared_ways(runs: dict[str, list[Decoded]]) -> Row:
    """Return medians of all ways, their ratios round by round, the share of the host's time that is hidden, and whether
    the tokens are the same."""
    seconds = {name: [run.step for run in own] for name, own in runs.items()}
    overlapped = runs[OVERLAPPED]
    metric, answers = METRICS["gap between tokens, median"], runs[NORMAL][0].answers
    return {
        "sides": {name: statistics.median(own) for name, own in seconds.items()},
        "seconds": seconds,
        "device": statistics.median(run.device for run in overlapped),
        "host": statistics.median(run.mean - run.waited for run in overlapped),
        "hidden": summary([run.hidden for run in overlapped]),
        "of_normal": compared(metric, seconds[OVERLAPPED], seconds[NORMAL]),
        "of_both_cores": compared(metric, seconds[OVERLAPPED], seconds[BOTH_CORES]),
        "same_tokens": all(run.answers == answers for own in runs.values() for run in own),
    }
