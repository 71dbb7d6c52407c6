"""Static batching, for comparison: what serving was before iteration-level scheduling, made of the engine's own parts.

A group of requests is formed, runs until the last of them has ended, and only then comes the next. To the engine that
is a caller who waits: `run_in_groups` hands a group in, waits for all of it, and hands in the next. With one group of
everything the same lines are continuous batching, and on an engine with `max_num_seqs=1` they are one request after
the other. Nothing else differs, so the difference in the numbers comes from the scheduling.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from rich.table import Table

from m1_single_request.errors import EngineError
from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.llm_engine import LLMEngine

SHORTEST_SHARE = 16  # the longest answer of a workload is so many times as long as the shortest
LONGEST_PROMPT, LONGEST_ANSWER = 32, 64  # tokens; so that the comparison takes seconds


@dataclass(frozen=True)
class Workload:
    """Requests that are all there at the start."""

    prompts: list[list[int]]
    params: list[SamplingParams]


@dataclass(frozen=True)
class Measurement:
    """One way to run a workload, measured."""

    max_num_seqs: int
    num_steps: int
    seconds: float
    latencies: list[float]
    """Seconds from the start, when all requests are there, to the end of each."""
    token_ids: list[tuple[int, ...]]
    """The answers, in the order of the workload."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_latency(self) -> float:
        return sum(self.latencies) / len(self.latencies)

    @property
    def p95_latency(self) -> float:
        """The latency that 95 % of the requests do not exceed."""
        return sorted(self.latencies)[ceil(0.95 * len(self.latencies)) - 1]

    @property
    def utilisation(self) -> float:
        """The share of places, steps x max_num_seqs, in which a request got a token."""
        return self.num_tokens / (self.num_steps * self.max_num_seqs)


def make_workload(num_prompts: int, text: Sequence[int], params: SamplingParams, *, longest_prompt: int) -> Workload:
    """Requests of very different length, always the same: pieces of `text` as prompts, answers up to 64 tokens.

    The answers go on past the end of sequence, so that their length is the drawn one. Short ones are more frequent
    than long ones, as in real traffic.
    """
    rng = Random(0)
    longest_prompt, longest = min(longest_prompt, LONGEST_PROMPT), min(params.max_tokens, LONGEST_ANSWER)
    shortest = max(1, longest // SHORTEST_SHARE)
    workload = Workload([], [])
    for _ in range(num_prompts):
        begin, length = rng.randrange(len(text)), rng.randint(min(4, longest_prompt), longest_prompt)
        workload.prompts.append([text[(begin + i) % len(text)] for i in range(length)])
        max_tokens = round(shortest * (longest / shortest) ** rng.random())
        workload.params.append(replace(params, max_tokens=max_tokens, ignore_eos=True))
    return workload


def run_in_groups(engine: LLMEngine, workload: Workload, group_size: int) -> Measurement:
    """Run a workload, each group when the one before it has ended altogether. The engine must be idle."""
    outputs: list[RequestOutput] = []
    num_steps, begin = engine.stats().num_steps, time.monotonic()
    for first in range(0, len(workload.prompts), group_size):
        group = slice(first, first + group_size)
        outputs += engine.generate_batch(workload.prompts[group], workload.params[group], progress=False).values()
    seconds, ends = time.monotonic() - begin, [output.metrics.finished_time for output in outputs]
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    return Measurement(
        max_num_seqs=engine.config.scheduler.max_num_seqs,
        num_steps=engine.stats().num_steps - num_steps,
        seconds=seconds,
        latencies=[end - begin for end in ends if end is not None],
        token_ids=[output.token_ids for output in outputs],
    )


def compare(engine: LLMEngine, single: LLMEngine, workload: Workload, *, rounds: int = 2) -> dict[str, Measurement]:
    """The workload run in each of the three ways, by name; of several rounds, the fastest of each.

    `single` is an engine with `max_num_seqs=1` on the same model.
    """
    everything = len(workload.prompts)
    ways: dict[str, Callable[[], Measurement]] = {
        "one by one": lambda: run_in_groups(single, workload, everything),
        "static": lambda: run_in_groups(engine, workload, engine.config.scheduler.max_num_seqs),
        "continuous": lambda: run_in_groups(engine, workload, everything),
    }
    for warm in (single, engine):
        run_in_groups(warm, Workload(workload.prompts[:1], workload.params[:1]), 1)
    measured: dict[str, list[Measurement]] = {name: [] for name in ways}
    for _ in range(rounds):  # in turn, so that a slow moment of the machine meets all of them
        for name, run in ways.items():
            measured[name].append(run())
    return {name: min(runs, key=lambda run: run.seconds) for name, runs in measured.items()}


def comparison_table(measured: dict[str, Measurement]) -> Table:
    """All numbers, a column for each way. The caption says how each was run."""
    runs = list(measured.values())
    slowest, most = runs[0], max(run.max_num_seqs for run in runs)
    table = Table(caption=CAPTION.format(most=most), caption_justify="left", title_justify="left")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    rows: list[tuple[str, Callable[[Measurement], str]]] = [
        ("steps", lambda run: f"{run.num_steps:,}"),
        ("output tokens", lambda run: f"{run.num_tokens:,}"),
        ("slots used (utilisation)", lambda run: f"{run.utilisation:.0%} of {run.max_num_seqs}"),
        ("wall time", lambda run: f"{run.seconds:.2f} s"),
        ("tokens per second", lambda run: f"{run.tokens_per_second:,.0f}"),
        ("  against one by one", lambda run: f"{run.tokens_per_second / slowest.tokens_per_second:.2f} x"),
        ("mean latency", lambda run: f"{run.mean_latency:.2f} s"),
        ("p95 latency", lambda run: f"{run.p95_latency:.2f} s"),
    ]
    for label, show in rows:
        table.add_row(label, *map(show, runs))
    return table


CAPTION = (
    "one by one: an engine with max_num_seqs = 1.\n"
    "static: an engine with max_num_seqs = {most}; requests are handed in {most} at a time, the next {most} when all "
    "of these have ended. A row that has ended costs nothing any more here; where static batching goes on computing it "
    "as padding, it is slower still.\n"
    "continuous: the same engine, all requests handed in at once.\n"
    "Latency counts from the start, when all requests are there; p95: 95 % are not slower. Times are the faster of two "
    "runs."
)


def what_it_shows(measured: dict[str, Measurement]) -> str:
    """The difference between static and continuous batching in a few sentences."""
    static, continuous = measured["static"], measured["continuous"]
    if static.num_steps == continuous.num_steps:
        return (
            "Static and continuous batching took the same steps: no request had to wait for a place that another one "
            "had left. Try more requests (--num-prompts) or another max_num_seqs."
        )
    places = static.num_steps * static.max_num_seqs
    differing = sum(a != b for a, b in zip(static.token_ids, continuous.token_ids, strict=True))
    answers = f"{some(differing, 'answer')} of {len(static.token_ids)} differ: other batches round differently"
    return (
        f"In static batching {places - static.num_tokens:,} of {places:,} places stayed empty while short answers "
        f"waited for the longest of their group. Continuous batching hands such a place to the next request at once: "
        f"{continuous.num_steps / static.num_steps:.0%} of the steps, "
        f"{continuous.tokens_per_second / static.tokens_per_second:.2f} times the tokens per second. "
        f"{answers if differing else 'Both gave the same answers, token for token'}."
    )
