"""Tour of the demo: three requests and a burst of later ones, drawn step by step; then three ways to batch, compared.

Part of `python -m m2_continuous_batching.demo`; no part of the engine depends on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.config import ModelConfig, TraceConfig
from m1_single_request.demo import as_prompt
from m1_single_request.errors import EngineError
from m1_single_request.llm_engine import LLMEngine as AnyEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.demo_static_batching import (
    Workload,
    compare,
    comparison_table,
    make_workload,
    what_it_shows,
)
from m2_continuous_batching.llm_engine import LLMEngine
from m2_continuous_batching.timeline import Timeline
from m2_continuous_batching.timeline_facts import facts

FIRST = ("What is the capital of France?", "Hello world!", "Explain quantum computing briefly.")
LATE = ("What is a KV cache?", "What is padding waste?", "Thank you!", "{facts}", "What is prefill?")
LATE_AFTER = 4  # steps
NOUNS = ("zebra", "otter", "lamp", "eagle", "candle", "goat", "kite")
ROUNDS = 2  # of the comparison
PACE = 0.05  # minimum time of a step in the live view, in seconds


@dataclass(frozen=True)
class Question:
    """A question: its title in the table, and the token ids of its prompt."""

    title: str
    token_ids: list[int]
    changes: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of this question only."""


@dataclass(frozen=True)
class Story:
    """Questions that arrive at the start, and later ones that arrive during the answers."""

    first: list[Question]
    late: list[Question]

    @property
    def questions(self) -> list[Question]:
        return self.first + self.late


def tour(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    trace: TraceConfig,
    params: SamplingParams,
    console: Console,
    *,
    num_prompts: int,
) -> None:
    """Show both parts. The default token budget is one token more than the longest prompt of the story."""
    configs: dict[str, Any] = {"model_config": model, "parts": {"model_loader": cache(LLMEngine.parts["model_loader"])}}
    with LLMEngine(scheduler_config=replace(scheduler, max_num_seqs=1), **configs) as single:
        story = make_story(single, scheduler.max_num_batched_tokens)
        longest = max(len(question.token_ids) for question in story.questions)
        budget = scheduler.max_num_batched_tokens or max(longest + 1, scheduler.max_num_seqs)
        scheduler = replace(scheduler, max_num_batched_tokens=budget)
        with LLMEngine(scheduler_config=scheduler, trace_config=trace, **configs) as engine:
            show_timeline(engine, story, params, console, live=not trace.readers)
            engine.tracer.close()  # the comparison is measured without a trace
            text = [token_id for question in story.questions for token_id in question.token_ids]
            workload = make_workload(num_prompts, text, params, longest_prompt=budget // scheduler.max_num_seqs)
            show_comparison(engine, single, workload, console)


# --- 1. the timeline --------------------------------------------------------------------------------------------------


def make_story(engine: AnyEngine, budget: int | None) -> Story:
    """Return the questions as prompts of this model. One prompt is a list of facts, as long as the limits allow."""
    intake = engine.engine_core.input_processor
    limit = min(budget or intake.max_model_len, intake.max_model_len - 1)

    def question(text: str, title: str | None = None) -> Question:
        prompt = as_prompt(engine, text)
        return Question(title or text, intake.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))

    for count in range(len(NOUNS), 0, -1):
        stated = "".join(f"The code of {noun} is {4821 - 531 * i:04}. " for i, noun in enumerate(NOUNS[:count]))
        asked = f"What is the code of {NOUNS[0]}?"
        recall = question(stated + asked, f"{asked} ({count} facts)")
        if len(recall.token_ids) <= limit:
            break
    late = [recall if text == "{facts}" else question(text) for text in LATE]
    return Story([question(text) for text in FIRST], late)


def show_timeline(
    engine: LLMEngine, story: Story, params: SamplingParams, console: Console, *, live: bool = True
) -> None:
    """Run the story, draw its timeline and print the facts. `live`: on a terminal, also draw it during the run."""
    limits, timeline = engine.config.scheduler, Timeline()
    console.rule("[bold]1. Requests join and leave at every step")
    longest = max(len(question.token_ids) for question in story.questions)
    chosen = ", one more than the longest prompt has" if limits.max_num_batched_tokens == longest + 1 else ""
    console.print(
        f"[italic]{len(story.first)} questions at the start, {len(story.late)} more after step {LATE_AFTER}. At most "
        f"{limits.max_num_seqs} requests run at a time (max_num_seqs). At most {limits.max_num_batched_tokens} new "
        f"tokens go through the model in a step (max_num_batched_tokens){chosen}. The model of the course was not "
        f"trained on the first three questions: watch the times of its answers, not their text.[/italic]\n"
    )
    engine.tracer.attach(timeline)
    live = live and console.is_terminal and not console.is_dumb_terminal
    with live_view(timeline, console) if live else nullcontext(lambda: None) as step_done:
        outputs = run_story(engine, story, params, step_done)
    console.print(timeline.draw(console.width))
    console.print()
    console.print(answers_table(story, outputs))
    console.print("\n[bold]Facts of this run")
    lines = Table.grid(padding=(0, 1))
    for fact in facts(timeline):
        lines.add_row("-", Text(fact))
    console.print(lines)


def run_story(
    engine: AnyEngine, story: Story, params: SamplingParams, step_done: Callable[[], None]
) -> list[RequestOutput]:
    """Run steps until all questions are answered. Late ones arrive after `LATE_AFTER` steps or when none is left."""

    def ask(questions: list[Question]) -> list[str]:
        return [engine.add_request(each.token_ids, replace(params, **each.changes)) for each in questions]

    request_ids = ask(story.first)
    outputs: dict[str, RequestOutput] = {}
    num_steps = 0
    while len(request_ids) < len(story.questions) or engine.has_unfinished_requests():
        if num_steps == LATE_AFTER or not engine.has_unfinished_requests():
            request_ids += ask(story.questions[len(request_ids) :])
        outputs |= engine.step()
        num_steps += 1
        step_done()
    for output in outputs.values():
        if output.error is not None:
            raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    return [outputs[request_id] for request_id in request_ids]


@contextmanager
def live_view(timeline: Timeline, console: Console) -> Iterator[Callable[[], None]]:
    """Yield a function that draws the end of the timeline after each step and waits; remove the drawing at the end."""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def step_done() -> None:
            status = f"\nstep {timeline.steps[-1]} (slowed down to be watched)"
            live.update(Group(timeline.draw(console.width, latest=True), Text(status, style="dim")), refresh=True)
            time.sleep(PACE)

        yield step_done


def answers_table(story: Story, outputs: list[RequestOutput]) -> Table:
    """Return a table with one line per answer: the question, the number of tokens and the text, cut to the width."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    several = any(len(output.outputs) > 1 for output in outputs)  # with `n` of later milestones
    widest = max(len(output.request_id) for output in outputs) + (2 if several else 0)
    for name, share, width in (("", 0, widest), ("question", 2, 0), ("tokens", 0, 9), ("answer", 3, 0)):
        table.add_column(name, ratio=share or None, min_width=width, no_wrap=True, overflow="ellipsis")
    for question, output in zip(story.questions, outputs, strict=True):
        for answer in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{output.request_id}/{answer.index}"
            tokens = f"{len(output.prompt_token_ids)} + {len(answer.token_ids)}"
            table.add_row(name, question.title, tokens, Text(" ".join(answer.text.split())))
    return table


# --- 2. the comparison ------------------------------------------------------------------------------------------------


def show_comparison(engine: LLMEngine, single: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure static batching, continuous batching and one by one on the same requests."""
    console.print()
    console.rule("[bold]2. Static batching against continuous batching")
    lengths = [params.max_tokens for params in workload.params]
    console.print(
        f"[italic]{len(lengths)} requests that all arrive at the start, with {min(lengths)} to {max(lengths)} output "
        f"tokens: the same requests in each column.[/italic]\n"
    )
    with console.status("measuring", refresh_per_second=2):
        measured = compare(engine, single, workload, rounds=ROUNDS)
    console.print(comparison_table(measured))
    console.print()
    console.print(Text(what_it_shows(measured)))
