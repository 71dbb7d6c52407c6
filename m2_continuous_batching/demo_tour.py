"""Tour of the demo: three requests and a burst of later ones, drawn step by step; then two ways to batch, compared.

Part of `python -m m2_continuous_batching.demo`; no part of the engine depends on it. The remark that opens a part is
the text of its function's docstring. Static batching, which is request-level scheduling as before Orca, runs a group of
requests until the last of them has ended, and only then starts the next group. `run` does that on an engine of
continuous batching; with all requests in one group, the same code is continuous batching. So the difference in the
numbers comes from the scheduling.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, headline, prompt_of, text_of
from m1_single_request.events import size, some
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import Records
from m2_continuous_batching.events import Forward, KVUsage, LeftOut, NotAdmitted
from m2_continuous_batching.views.timeline import Timeline

FIRST = ("What is the capital of France?", "Hello world!", "Explain quantum computing briefly.")
NOUNS = ("kite", "goat", "candle", "eagle", "lamp", "otter", "zebra")
FACTS = [f"The code of {noun} is {1635 + 531 * i:04}. " for i, noun in enumerate(NOUNS)]
RECALL = "What is the code of zebra?"
LATE = ("What is a KV cache?", "What is padding waste?", "Thank you!", RECALL, "What is prefill?")
LATE_AFTER = 4  # steps
PACE = 0.05  # minimum time of a step in the live view, in seconds
ANSWER_RATIO = 16  # length of the longest answer of a workload, divided by the shortest
LONGEST_PROMPT, LONGEST_ANSWER = 32, 64  # tokens; so that the comparison takes seconds
ROUNDS = 2

T = TypeVar("T")
Workload = list[tuple[list[int], SamplingParams]]
"""Prompts that all arrive at the start, and their parameters."""

Draw = Callable[[], RenderableType]
"""Returns a view of the run until now."""


@dataclass(frozen=True)
class Question:
    """A question of the tour."""

    text: str
    token_ids: list[int]
    params: SamplingParams
    arrival: int
    """Number of steps before it."""


def tour(engine: LLMEngine, params: SamplingParams, console: Console, *, num_prompts: int) -> None:
    """Draw the questions step by step, and print facts of this run; then compare two ways to batch.

    {first} questions at the start, {late} more after step {after}. At most {limits.max_num_seqs} requests run at a time
    (max_num_seqs), with at most {limits.max_num_batched_tokens} new tokens in a step (max_num_batched_tokens). The
    model of the course was not trained on the first three questions: watch the times of its answers, not their text.
    """
    limits, timeline, records = engine.config.scheduler, Timeline(), Records()
    story = make_story(engine, params, limits.max_num_batched_tokens)
    numbers = {"first": len(FIRST), "late": len(LATE), "after": LATE_AFTER, "limits": limits}
    open_part(console, "1. Requests join and leave at every step", tour, **numbers)
    engine.tracer.attach(timeline)
    engine.tracer.attach(records)
    outputs = run_story(engine, story, console, partial(timeline.draw, console.width, latest=True))
    engine.tracer.close()
    console.print(timeline.draw(console.width))
    show_answers(console, story, outputs)
    bullets(console, facts(timeline, records, engine.stats()))
    longest = limits.max_num_batched_tokens // limits.max_num_seqs
    workload = make_workload(num_prompts, prompt_of(engine, "".join(FACTS)), params, longest_prompt=longest)
    show_comparison(engine, workload, console)


def open_part(console: Console, title: str, part: Any, **numbers: object) -> None:
    """Print the title of a part of a tour, and the text of its function's docstring with these numbers."""
    headline(console, title, text_of(part.__doc__).format(**numbers))


# --- 1. the questions -------------------------------------------------------------------------------------------------


def make_story(engine: LLMEngine, params: SamplingParams, budget: int) -> list[Question]:
    """Return the questions as prompts of this model. One has as many facts before it as `budget` tokens allow."""
    limit = min(budget, engine.stats().max_model_len - 1)

    def question(text: str, arrival: int) -> Question:
        facts = [FACTS[first:] for first in range(len(FACTS))] if text == RECALL else [[]]
        prompts = [prompt_of(engine, "".join([*each, text])) for each in facts]
        prompt = next((each for each in prompts if len(each) <= limit), prompts[-1])
        return Question(f"Facts, and: {text}" if text == RECALL else text, prompt, params, arrival)

    return [*(question(text, 0) for text in FIRST), *(question(text, LATE_AFTER) for text in LATE)]


def run_story(engine: LLMEngine, story: list[Question], console: Console, draw: Draw) -> list[RequestOutput]:
    """Run steps until all questions are answered. Late ones arrive earlier if the engine is idle before.

    On a terminal, what `draw` returns is drawn after each step, and erased in the end.
    """
    coming, outputs, num_steps = list(story), dict[str, RequestOutput | None](), 0
    with Live(get_renderable=draw, console=console, auto_refresh=False, transient=True) as live:
        while coming or engine.has_unfinished_requests():
            now = num_steps if engine.has_unfinished_requests() else coming[0].arrival
            while coming and coming[0].arrival <= now:
                question = coming.pop(0)
                outputs[engine.add_request(question.token_ids, question.params)] = None
            outputs |= engine.step()
            num_steps += 1
            live.refresh()
            time.sleep(PACE if console.is_terminal else 0)
    return [checked(output) for output in outputs.values() if output]


def show_answers(console: Console, story: list[Question], outputs: list[RequestOutput]) -> None:
    """Print a line per answer: its request, the question and the text, cut to the width."""
    for question, output in zip(story, outputs, strict=True):
        for answer in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
            text = f"{question.text}  {' '.join(answer.text.split())}"
            console.print(Text.assemble((f"{name:<8}", "bold"), text), no_wrap=True, overflow="ellipsis")
    console.print()


def facts(timeline: Timeline, records: Records, stats: Any) -> list[str]:
    """Return facts of a run with its numbers: the first event of some kinds, if there is one, and totals of `stats`."""
    prefills = [pair for pair in records.of(Forward) if pair[1].mode == "prefill" and pair[1].num_requests > 1]
    waits = {rid: lane.states.count("queued") for rid, lane in timeline.lanes.items()}
    slowest = max(waits, key=waits.__getitem__)
    waiting = [pair for pair in records.of(NotAdmitted) if pair[1].rid == slowest]
    fullest = max((usage for _, usage in records.of(KVUsage)), key=lambda usage: usage.kv_bytes_used)
    padded, places = stats.padded_tokens, stats.padded_tokens + stats.useful_tokens
    return [
        *(f"Step {step}: {event.explain()}" for step, event in [*prefills[:1], *records.of(LeftOut)[:1]]),
        *(f"{slowest} waits longest, {some(waits[slowest], 'step')}. Step {n}: {e.explain()}" for n, e in waiting[-1:]),
        f"Padding: {padded:,} of {places:,} places in the tensors of all steps hold no token ({padded / places:.0%}).",
        f"The fullest step: {fullest.explain()} A slot is as long as the longest request may become; m3 removes this.",
        f"{some(stats.num_steps, 'step')} made {some(stats.num_output_tokens, 'output token')}. One request after the "
        f"other takes {some(stats.num_output_tokens, 'step')}.",
    ]


# --- 2. the comparison ------------------------------------------------------------------------------------------------


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


def show_comparison(engine: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure static batching and continuous batching on the same requests.

    The same {count} requests twice, with {least} to {most} output tokens, all of which wait from the start. Static:
    {group} are submitted at a time, the next {group} when all of these have ended. Continuous: all at once. Latency is
    the mean time from the start to the end of a request.
    """
    lengths, group = [params.max_tokens for _, params in workload], engine.config.scheduler.max_num_seqs
    numbers = {"count": len(workload), "least": min(lengths), "most": max(lengths), "group": group}
    open_part(console, "2. Static batching against continuous batching", show_comparison, **numbers)
    runs = compare(workload, {"static": (engine, group), "continuous": (engine, len(workload))}, console)
    static, continuous = runs.values()
    bullets(console, [conclusion(static, continuous), same_answers(static.token_ids, continuous.token_ids)])


def conclusion(static: Run, continuous: Run) -> str:
    """Return the difference between static and continuous batching in sentences."""
    if len(static.stats) == len(continuous.stats):
        return "Both take as many steps. Try more requests: --num-prompts."
    speed = continuous.tokens_per_second / static.tokens_per_second
    return (
        f"In static batching the place of a request stays empty until the longest of its group has ended. Continuous "
        f"batching gives it to the next request at once: {len(continuous.stats) / len(static.stats):.0%} of the steps, "
        f"{speed:.2f} times the tokens per second"
        f"{'' if speed > 1 else ', because another program disturbed this run'}."
    )


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


def in_turn(ways: Mapping[str, Callable[[], T]], console: Console, num_rounds: int) -> dict[str, list[T]]:
    """Return what each way returns in several rounds; they take turns: a slow period of the machine meets all."""
    with console.status("measuring", refresh_per_second=2):
        rounds = [{name: way() for name, way in ways.items()} for _ in range(num_rounds)]
    return {name: [results[name] for results in rounds] for name in ways}


def compare(workload: Workload, sides: Mapping[str, tuple[LLMEngine, int]], console: Console) -> dict[str, Run]:
    """Measure engines, each with its size of a group; print a table of the fastest runs, and return them."""
    ways = {name: partial(run, engine, workload, group_size) for name, (engine, group_size) in sides.items()}
    rounds = in_turn(ways, console, ROUNDS)
    runs = {name: min(own, key=lambda run: run.seconds) for name, own in rounds.items()}
    columns = ("steps", "running, at most", "mean", "mean KV", "tokens/s", "latency")
    table = Table("", *columns, box=None, padding=(0, 2, 0, 0))
    for name, own in runs.items():
        running, kv_bytes = [each.num_running for each in own.stats], [each.kv_bytes for each in own.stats]
        numbers = f"{len(running):,}", str(max(running)), f"{mean(running):.1f}", size(round(mean(kv_bytes)))
        table.add_row(name, *numbers, f"{own.tokens_per_second:,.0f}", f"{mean(own.latencies):.2f} s")
    console.print(table, "")
    return runs


def same_answers(*runs: Sequence[Any]) -> str:
    """Return the number of requests whose answers, which these runs list in one order, differ, in a sentence."""
    answers = list(zip(*runs, strict=True))
    differing = sum(any(each != first for each in others) for first, *others in answers)
    if differing:
        return f"{differing} of {some(len(answers), 'answer')} differ: other batches round differently."
    return f"The answers are the same, token for token, all {len(answers)} of them."
