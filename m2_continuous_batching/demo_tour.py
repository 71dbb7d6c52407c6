"""Tour of the demo: three requests and a burst of later ones, drawn step by step; then three ways to batch, compared.

Part of `python -m m2_continuous_batching.demo`; no part of the engine depends on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from m1_single_request.demo import as_prompt
from m1_single_request.demo_tour import bullets, checked, headline
from m1_single_request.events import some
from m1_single_request.llm_engine import LLMEngine as AnyEngine
from m1_single_request.output_events import Finish
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.demo_comparison import Run, Workload, compared, fastest, make_workload, run, same_answers
from m2_continuous_batching.events import Forward, KVUsage, LeftOut, NotAdmitted
from m2_continuous_batching.llm_engine import LLMEngine
from m2_continuous_batching.views.timeline import Timeline

FIRST = ("What is the capital of France?", "Hello world!", "Explain quantum computing briefly.")
LATE = ("What is a KV cache?", "What is padding waste?", "Thank you!", "{facts}", "What is prefill?")
LATE_AFTER = 4  # steps
NOUNS = ("zebra", "otter", "lamp", "eagle", "candle", "goat", "kite")
PACE = 0.05  # minimum time of a step in the live view, in seconds


@dataclass(frozen=True)
class Question:
    """A question of the tour."""

    title: str
    token_ids: list[int]
    arrival: int
    """Number of steps before it."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of this question only."""


def tour(engine: LLMEngine, params: SamplingParams, console: Console, *, num_prompts: int, is_live: bool) -> None:
    """Show both parts."""
    limits = engine.config.scheduler
    story = make_story(engine, limits.max_num_batched_tokens)
    show_timeline(engine, story, params, console, is_live=is_live)
    text = [token_id for question in story for token_id in question.token_ids]
    longest = limits.max_num_batched_tokens // limits.max_num_seqs
    show_comparison(engine, make_workload(num_prompts, text, params, longest_prompt=longest), console)


# --- 1. the timeline --------------------------------------------------------------------------------------------------


def make_story(engine: AnyEngine, budget: int) -> list[Question]:
    """Return the questions as prompts of this model. One prompt is a list of facts, as long as the limits allow."""
    intake = engine.engine_core.input_processor
    limit = min(budget, intake.max_model_len - 1)

    def question(text: str, arrival: int, title: str | None = None) -> Question:
        prompt = as_prompt(engine, {"role": "user", "content": text})
        token_ids = intake.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return Question(title or text, token_ids, arrival)

    for count in range(len(NOUNS), 0, -1):
        stated = "".join(f"The code of {noun} is {4821 - 531 * i:04}. " for i, noun in enumerate(NOUNS[:count]))
        asked = f"What is the code of {NOUNS[0]}?"
        recall = question(stated + asked, LATE_AFTER, f"{asked} ({count} facts)")
        if len(recall.token_ids) <= limit:
            break
    late = [recall if text == "{facts}" else question(text, LATE_AFTER) for text in LATE]
    return [*(question(text, 0) for text in FIRST), *late]


def show_timeline(
    engine: LLMEngine, story: list[Question], params: SamplingParams, console: Console, *, is_live: bool
) -> None:
    """Run the story, draw its timeline and print the facts."""
    limits, timeline = engine.config.scheduler, Timeline()
    headline(
        console,
        "1. Requests join and leave at every step",
        f"{len(FIRST)} questions at the start, {len(LATE)} more after step {LATE_AFTER}. At most "
        f"{limits.max_num_seqs} requests run at a time (max_num_seqs), with at most {limits.max_num_batched_tokens} "
        f"new tokens in a step (max_num_batched_tokens). The model of the course was not trained on the first three "
        f"questions: watch the times of its answers, not their text.",
    )
    engine.tracer.attach(timeline)
    latest = partial(timeline.draw, console.width, latest=True)
    with live_view(console, latest, lambda: PACE, is_live=is_live) as step_done:
        outputs = run_story(engine, story, params, step_done)
    engine.tracer.close()
    console.print(timeline.draw(console.width))
    show_answers(console, story, outputs)
    bullets(console, facts(timeline))


def run_story(
    engine: AnyEngine, story: list[Question], params: SamplingParams, step_done: Callable[[], None]
) -> list[RequestOutput]:
    """Run steps until all questions are answered. Late ones arrive earlier if the engine is idle before."""
    coming, outputs, num_steps = list(story), dict[str, RequestOutput | None](), 0
    while coming or engine.has_unfinished_requests():
        now = num_steps if engine.has_unfinished_requests() else coming[0].arrival
        while coming and coming[0].arrival <= now:
            question = coming.pop(0)
            outputs[engine.add_request(question.token_ids, replace(params, **question.changes))] = None
        outputs |= engine.step()
        num_steps += 1
        step_done()
    return [checked(output) for output in outputs.values() if output]


@contextmanager
def live_view(
    console: Console, draw: Callable[[], RenderableType], pause: Callable[[], float], *, is_live: bool
) -> Iterator[Callable[[], None]]:
    """Yield a function that draws a view after each step and waits for `pause()` seconds; erase the view at the end.

    Without `is_live`, or without a terminal, the function does nothing.
    """
    if not is_live or not console.is_terminal or console.is_dumb_terminal:
        yield lambda: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def step_done() -> None:
            live.update(draw(), refresh=True)
            time.sleep(pause())

        yield step_done


def show_answers(console: Console, story: list[Question], outputs: list[RequestOutput]) -> None:
    """Print a line per answer: its request, the question and the text, cut to the width."""
    for question, output in zip(story, outputs, strict=True):
        for answer in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
            text = f"{question.title}  {' '.join(answer.text.split())}"
            console.print(Text.assemble((f"{name:<8}", "bold"), text), no_wrap=True, overflow="ellipsis")
    console.print()


def facts(timeline: Timeline) -> list[str]:
    """Return facts of a run with its numbers: the first event of some kinds, and sums. Others are omitted."""
    usage = [event for _, event in timeline.of(KVUsage)]
    if not usage:
        return []
    prefills = [pair for pair in timeline.of(Forward) if pair[1].mode == "prefill" and pair[1].num_requests > 1]
    first = [*prefills[:1], *list(timeline.of(LeftOut))[:1]]
    waits = {rid: lane.states.count("queued") for rid, lane in timeline.lanes.items()}
    slowest = max(waits, key=waits.__getitem__)
    refused = [pair for pair in timeline.of(NotAdmitted) if pair[1].rid == slowest]
    places, padded = sum(u.useful_tokens + u.padded_tokens for u in usage), sum(u.padded_tokens for u in usage)
    fullest = max(usage, key=lambda u: u.kv_bytes_used)
    num_tokens = sum(event.out_len for _, event in timeline.of(Finish))
    return [
        *(f"Step {step}: {event.explain()}" for step, event in first),
        *(f"{slowest} waits longest, {some(waits[slowest], 'step')}. Step {n}: {e.explain()}" for n, e in refused[-1:]),
        f"Padding: {padded:,} of {places:,} places in the tensors of all steps hold no token ({padded / places:.0%}).",
        f"The fullest step: {fullest.explain()} A slot is as long as the longest request may become; m3 removes this.",
        f"{some(len(timeline.steps), 'step')} made {some(num_tokens, 'output token')}. One request after the other "
        f"takes {some(num_tokens, 'step')}.",
    ]


# --- 2. the comparison ------------------------------------------------------------------------------------------------


def show_comparison(engine: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure static batching and continuous batching on the same requests."""
    lengths, size = [params.max_tokens for _, params in workload], engine.config.scheduler.max_num_seqs
    headline(
        console,
        "2. Static batching against continuous batching",
        f"The same {len(workload)} requests in each column, with {min(lengths)} to {max(lengths)} output tokens, all "
        f"there at the start. Static: {size} are submitted at a time, the next {size} when all of these have ended. "
        f"Continuous: all at once. Latency counts from the start.",
    )
    with console.status("measuring", refresh_per_second=2):
        groups = {"static": size, "continuous": len(workload)}
        runs = fastest({name: partial(run, engine, workload, count) for name, count in groups.items()})
    rows: dict[str, Callable[[Run], str]] = {
        "steps": lambda own: f"{len(own.stats):,}",
        "requests in flight, on average": lambda own: f"{own.mean(lambda stats: stats.num_running):.1f}",
        "wall time": lambda own: f"{own.seconds:.2f} s",
        "tokens per second": lambda own: f"{own.tokens_per_second:,.0f}",
        "mean latency": lambda own: f"{own.mean_latency:.2f} s",
    }
    console.print(compared(runs, rows))
    bullets(console, [conclusion(runs["static"], runs["continuous"], size), same_answers(runs)])


def conclusion(static: Run, continuous: Run, size: int) -> str:
    """Return the difference between static and continuous batching, in groups of `size`, in sentences."""
    if len(static.stats) == len(continuous.stats):
        return "No request waited for a slot that another had left. Try more requests: --num-prompts."
    slots, speed = len(static.stats) * size, continuous.tokens_per_second / static.tokens_per_second
    return (
        f"In static batching {slots - static.num_tokens:,} of {slots:,} slots stayed empty while short answers waited "
        f"for the longest of their group. Continuous batching gives such a slot to the next request at once: "
        f"{len(continuous.stats) / len(static.stats):.0%} of the steps, {speed:.2f} times the tokens per second"
        f"{'' if speed > 1 else ', because another program disturbed this run'}."
    )
