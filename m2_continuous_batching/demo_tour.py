"""Tour of the demo: three requests and a burst of later ones, drawn step by step; then two ways to batch, compared.

Part of `python -m m2_continuous_batching.demo`; no part of the engine depends on it. The remark that opens a part is
the text of its function's docstring.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, headline, text_of, user_prompt
from m1_single_request.events import some
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import Records
from m2_continuous_batching.demo_comparison import Run, Workload, compare, make_workload, run, same_answers
from m2_continuous_batching.events import Forward, KVUsage, LeftOut, NotAdmitted
from m2_continuous_batching.views.timeline import Timeline

FIRST = ("What is the capital of France?", "Hello world!", "Explain quantum computing briefly.")
RECALL = "{facts}What is the code of zebra?"
LATE = ("What is a KV cache?", "What is padding waste?", "Thank you!", RECALL, "What is prefill?")
LATE_AFTER = 4  # steps
NOUNS = ("zebra", "otter", "lamp", "eagle", "candle", "goat", "kite")
PACE = 0.05  # minimum time of a step in the live view, in seconds

Draw = Callable[[], RenderableType]
"""Returns a view of the run until now."""


@dataclass(frozen=True)
class Question:
    """A question of the tour."""

    title: str
    token_ids: list[int]
    params: SamplingParams
    arrival: int
    """Number of steps before it."""


def tour(engine: LLMEngine, params: SamplingParams, console: Console, *, num_prompts: int, is_live: bool) -> None:
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
    draw = partial(timeline.draw, console.width, latest=True) if is_live else None
    outputs = run_story(engine, story, console, draw)
    engine.tracer.close()
    console.print(timeline.draw(console.width))
    show_answers(console, story, outputs)
    bullets(console, facts(timeline, records, engine.stats()))
    text = [token_id for question in story for token_id in question.token_ids]
    longest = limits.max_num_batched_tokens // limits.max_num_seqs
    show_comparison(engine, make_workload(num_prompts, text, params, longest_prompt=longest), console)


def open_part(console: Console, title: str, part: Any, **numbers: object) -> None:
    """Print the title of a part of a tour, and the text of its function's docstring with these numbers."""
    headline(console, title, text_of(part.__doc__).format(**numbers))


# --- 1. the questions -------------------------------------------------------------------------------------------------


def make_story(engine: LLMEngine, params: SamplingParams, budget: int) -> list[Question]:
    """Return the questions as prompts of this model. One has as many facts before it as `budget` tokens allow."""
    limit = min(budget, engine.stats().max_model_len - 1)
    facts = [f"The code of {noun} is {4821 - 531 * i:04}. " for i, noun in enumerate(NOUNS)]
    while len(facts) > 1 and len(user_prompt(engine, RECALL.format(facts="".join(facts)))) > limit:
        facts.pop()

    def question(text: str, arrival: int) -> Question:
        title, prompt = text.format(facts=f"{len(facts)} facts. "), text.format(facts="".join(facts))
        return Question(title, user_prompt(engine, prompt), params, arrival)

    return [*(question(text, 0) for text in FIRST), *(question(text, LATE_AFTER) for text in LATE)]


def run_story(engine: LLMEngine, story: list[Question], console: Console, draw: Draw | None) -> list[RequestOutput]:
    """Run steps until all questions are answered. Late ones arrive earlier if the engine is idle before.

    On a terminal, what `draw` returns is drawn after each step, and erased in the end.
    """
    is_live = draw is not None and console.is_terminal and not console.is_dumb_terminal
    coming, outputs, num_steps = list(story), dict[str, RequestOutput | None](), 0
    with Live(console=console, auto_refresh=False, transient=True) if is_live else nullcontext() as live:
        while coming or engine.has_unfinished_requests():
            now = num_steps if engine.has_unfinished_requests() else coming[0].arrival
            while coming and coming[0].arrival <= now:
                question = coming.pop(0)
                outputs[engine.add_request(question.token_ids, question.params)] = None
            outputs |= engine.step()
            num_steps += 1
            if live is not None and draw is not None:
                live.update(draw(), refresh=True)
                time.sleep(PACE)
    return [checked(output) for output in outputs.values() if output]


def show_answers(console: Console, story: list[Question], outputs: list[RequestOutput]) -> None:
    """Print a line per answer: its request, the question and the text, cut to the width."""
    for question, output in zip(story, outputs, strict=True):
        for answer in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
            text = f"{question.title}  {' '.join(answer.text.split())}"
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


def show_comparison(engine: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure static batching and continuous batching on the same requests.

    The same {count} requests twice, with {least} to {most} output tokens, all of which wait from the start. Static:
    {size} are submitted at a time, the next {size} when all of these have ended. Continuous: all at once. Latency is
    the mean time from the start to the end of a request.
    """
    lengths, size = [params.max_tokens for _, params in workload], engine.config.scheduler.max_num_seqs
    numbers = {"count": len(workload), "least": min(lengths), "most": max(lengths), "size": size}
    open_part(console, "2. Static batching against continuous batching", show_comparison, **numbers)
    groups = {"static": size, "continuous": len(workload)}
    runs = compare({name: partial(run, engine, workload, count) for name, count in groups.items()}, console)
    bullets(console, [conclusion(runs["static"], runs["continuous"], size), same_answers(runs)])


def conclusion(static: Run, continuous: Run, size: int) -> str:
    """Return the difference between static and continuous batching, in groups of `size`, in sentences."""
    if len(static.stats) == len(continuous.stats):
        return "Both take as many steps. Try more requests: --num-prompts."
    lengths = [len(token_ids) for token_ids in static.token_ids]
    groups = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    places = sum(len(group) * max(group) for group in groups)
    speed = continuous.tokens_per_second / static.tokens_per_second
    return (
        f"In static batching the place of a request stays empty until the longest of its group has ended: "
        f"{places - sum(lengths):,} of {places:,} places in all steps. Continuous batching gives a place to the next "
        f"request at once: {len(continuous.stats) / len(static.stats):.0%} of the steps, {speed:.2f} times the tokens "
        f"per second{'' if speed > 1 else ', because another program disturbed this run'}."
    )
