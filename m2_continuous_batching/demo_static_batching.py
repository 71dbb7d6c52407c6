"""Static batching, for comparison: request-level scheduling as before Orca, run on the same engine.

Static batching runs a group of requests until the last of them has ended, and only then starts the next group. Here the
caller does that: `run_in_groups` submits a group, waits for all of it, and submits the next. With all requests in one
group, the same code is continuous batching; on an engine with `max_num_seqs=1`, it runs one request after the other.
The code is the same, so the difference in the numbers comes from the scheduling.
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

ANSWER_RATIO = 16  # length of the longest answer of a workload, divided by the shortest
LONGEST_PROMPT, LONGEST_ANSWER = 32, 64  # tokens; so that the comparison takes seconds


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at the start."""

    prompts: list[list[int]]
    params: list[SamplingParams]


@dataclass(frozen=True)
class Measurement:
    """Measurement of one run of a workload."""

    max_num_seqs: int
    num_steps: int
    seconds: float
    latencies: list[float]
    """Seconds from the start, when all requests arrive, to the end of each request."""
    token_ids: list[tuple[int, ...]]
    """The output tokens of each request, in the order of the workload."""

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
        """95th percentile of the latencies, in seconds."""
        return sorted(self.latencies)[ceil(0.95 * len(self.latencies)) - 1]

    @property
    def utilisation(self) -> float:
        """Fraction of the slots (steps x max_num_seqs) in which a request got a token."""
        return self.num_tokens / (self.num_steps * self.max_num_seqs)


def make_workload(num_prompts: int, text: Sequence[int], params: SamplingParams, *, longest_prompt: int) -> Workload:
    """Make requests of very different lengths: pieces of `text` as prompts, answers of at most 64 tokens.

    The random seed is fixed, so the workload is always the same. Answers continue after the end of sequence, so that
    their length is the drawn one. Short answers are more frequent than long ones, as in real traffic.
    """
    rng = Random(0)
    longest_prompt, longest = min(longest_prompt, LONGEST_PROMPT), min(params.max_tokens, LONGEST_ANSWER)
    shortest = max(1, longest // ANSWER_RATIO)
    workload = Workload([], [])
    for _ in range(num_prompts):
        begin, length = rng.randrange(len(text)), rng.randint(min(4, longest_prompt), longest_prompt)
        workload.prompts.append([text[(begin + i) % len(text)] for i in range(length)])
        max_tokens = round(shortest * (longest / shortest) ** rng.random())
        workload.params.append(replace(params, max_tokens=max_tokens, ignore_eos=True))
    return workload


def run_in_groups(engine: LLMEngine, workload: Workload, group_size: int) -> Measurement:
    """Run a workload in groups; each group starts when all requests of the group before have ended.

    The engine must be idle.
    """
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
    """Run the workload in each of the three ways; return the fastest measurement of each, by name.

    `single` is an engine with `max_num_seqs=1` on the same model. Each way is run `rounds` times.
    """
    num_requests = len(workload.prompts)
    ways: dict[str, Callable[[], Measurement]] = {
        "one by one": lambda: run_in_groups(single, workload, num_requests),
        "static": lambda: run_in_groups(engine, workload, engine.config.scheduler.max_num_seqs),
        "continuous": lambda: run_in_groups(engine, workload, num_requests),
    }
    for warm in (single, engine):
        run_in_groups(warm, Workload(workload.prompts[:1], workload.params[:1]), 1)
    measured: dict[str, list[Measurement]] = {name: [] for name in ways}
    for _ in range(rounds):  # alternating, so that a slow period of the machine affects all of them
        for name, run in ways.items():
            measured[name].append(run())
    return {name: min(runs, key=lambda run: run.seconds) for name, runs in measured.items()}


def comparison_table(measured: dict[str, Measurement]) -> Table:
    """Return a table of all numbers, one column per way. The caption describes the three ways."""
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
    "static: an engine with max_num_seqs = {most}; {most} requests are submitted at a time, the next {most} when all "
    "of these have ended. Here a row that has ended is no longer computed; static batching that computes it as padding "
    "is slower still.\n"
    "continuous: the same engine, all requests submitted at once.\n"
    "Latency counts from the start, when all requests arrive; p95: 95 % are not slower. Times are the faster of two "
    "runs."
)


def what_it_shows(measured: dict[str, Measurement]) -> str:
    """Describe the difference between static and continuous batching in a few sentences."""
    static, continuous = measured["static"], measured["continuous"]
    if static.num_steps == continuous.num_steps:
        return (
            "Static and continuous batching took the same number of steps: no request waited for a slot that another "
            "request had left. Try more requests (--num-prompts) or another max_num_seqs."
        )
    slots = static.num_steps * static.max_num_seqs
    differing = sum(a != b for a, b in zip(static.token_ids, continuous.token_ids, strict=True))
    answers = f"{some(differing, 'answer')} of {len(static.token_ids)} differ: other batches round differently"
    return (
        f"In static batching {slots - static.num_tokens:,} of {slots:,} slots stayed empty while short answers "
        f"waited for the longest of their group. Continuous batching gives such a slot to the next request at once: "
        f"{continuous.num_steps / static.num_steps:.0%} of the steps, "
        f"{continuous.tokens_per_second / static.tokens_per_second:.2f} times the tokens per second. "
        f"{answers if differing else 'Both gave the same answers, token for token'}."
    )
