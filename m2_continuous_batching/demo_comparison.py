"""Comparison of ways to run the same requests: their steps, their speed, their answers.

Static batching, which is request-level scheduling as before Orca, runs a group of requests until the last of them has
ended, and only then starts the next group. `run` does that on an engine of continuous batching; with all requests in
one group, the same code is continuous batching. So the difference in the numbers comes from the scheduling.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from m1_single_request.demo_tour import checked
from m1_single_request.events import size, some
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams

ANSWER_RATIO = 16  # length of the longest answer of a workload, divided by the shortest
LONGEST_PROMPT, LONGEST_ANSWER = 32, 64  # tokens; so that the comparison takes seconds
ROUNDS = 2

Workload = list[tuple[list[int], SamplingParams]]
"""Prompts that all arrive at the start, and their parameters."""


@dataclass(frozen=True)
class Run:
    """One run of a workload."""

    seconds: float
    latencies: list[float]
    """Seconds from the start, when all requests arrive, to the end of each request."""
    token_ids: list[tuple[int, ...]]
    """The output tokens of each request, in the order of the workload."""
    stats: list[Any]
    """The engine's statistics after each step."""

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def make_workload(num_prompts: int, text: Sequence[int], params: SamplingParams, *, longest_prompt: int) -> Workload:
    """Make requests of very different lengths: pieces of `text` as prompts, answers of at most 64 tokens.

    The random seed is fixed, so the workload is always the same; each request has a seed, so that drawn answers can be
    compared. Answers continue after the end of sequence, so that their length is the drawn one. Short answers are more
    frequent than long ones, as in real traffic.
    """
    rng, workload = Random(0), Workload()
    longest_prompt, longest = min(longest_prompt, LONGEST_PROMPT), min(params.max_tokens, LONGEST_ANSWER)
    shortest = max(1, longest // ANSWER_RATIO)
    for number in range(num_prompts):
        begin, length = rng.randrange(len(text)), rng.randint(min(4, longest_prompt), longest_prompt)
        prompt = [text[(begin + i) % len(text)] for i in range(length)]
        max_tokens = round(shortest * (longest / shortest) ** rng.random())
        seed = number if params.seed is None else params.seed
        workload.append((prompt, replace(params, max_tokens=max_tokens, ignore_eos=True, seed=seed)))
    return workload


def run(engine: LLMEngine, workload: Workload, group_size: int) -> Run:
    """Run a workload in groups; each group starts when all requests of the group before have ended."""
    begin, outputs, stats = time.monotonic(), dict[str, RequestOutput | None](), []
    for first in range(0, len(workload), group_size):
        outputs |= dict.fromkeys(engine.add_request(*request) for request in workload[first : first + group_size])
        while engine.has_unfinished_requests():
            outputs |= engine.step()
            stats.append(engine.stats())
    seconds, done = time.monotonic() - begin, [checked(output) for output in outputs.values() if output]
    latencies = [(output.metrics.finished_time or 0.0) - begin for output in done]
    return Run(seconds, latencies, [output.token_ids for output in done], stats)


def fastest(ways: dict[str, Callable[[], Run]]) -> dict[str, Run]:
    """Run each way several times, in turn, so that a slow period of the machine meets all; return the fastest runs."""
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    return {name: min((each[name] for each in rounds), key=lambda run: run.seconds) for name in ways}


def compare(ways: dict[str, Callable[[], Run]], console: Console) -> dict[str, Run]:
    """Measure each way in several rounds; print a table of the fastest runs, and return them."""
    with console.status("measuring", refresh_per_second=2):
        runs = fastest(ways)
    columns = ("steps", "running, at most", "mean", "mean KV", "tokens/s", "latency")
    table = Table("", *columns, box=None, padding=(0, 2, 0, 0))
    for name, own in runs.items():
        running, kv_bytes = [each.num_running for each in own.stats], [each.kv_bytes for each in own.stats]
        numbers = f"{len(running):,}", str(max(running)), f"{mean(running):.1f}", size(round(mean(kv_bytes)))
        table.add_row(name, *numbers, f"{own.tokens_per_second:,.0f}", f"{mean(own.latencies):.2f} s")
    console.print(table, "")
    return runs


def same_answers(runs: dict[str, Run]) -> str:
    """Return the number of requests whose answer is not the same in all runs, in a sentence."""
    answers = list(zip(*(run.token_ids for run in runs.values()), strict=True))
    differing = sum(len(set(each)) > 1 for each in answers)
    if differing:
        return f"{differing} of {some(len(answers), 'answer')} differ: other batches round differently."
    return f"The answers are the same both ways, token for token, all {len(answers)} of them."
