"""Part 1 of the demo's tour: a long prompt comes while others stream.

Part of `python -m m5_chunked_prefill_spec.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m4_radix_cache.demo_parts.users import several
from m5_chunked_prefill_spec.demo_parts.notes import Notes, bar
from m5_chunked_prefill_spec.demo_parts.stage import (
    ROUNDS,
    STREAMS,
    Settings,
    ask,
    checked,
    headline,
    long_question,
)
from m5_chunked_prefill_spec.llm_engine import LLMEngine

PIECES, WHOLE = "in pieces", "whole"
BEFORE = 6  # tokens of every stream before the long prompt comes
WIDTH = 60  # of charts


@dataclass(frozen=True)
class Run:
    """One round on one engine."""

    arrivals: list[list[float]]
    """For each stream: when its tokens came, in seconds since the start."""
    outputs: dict[str, RequestOutput]
    late: str
    """The id of the long prompt."""
    came: float
    """When it came."""
    seconds: float

    @property
    def gaps(self) -> list[float]:
        """Between two tokens of a stream, all streams together, from the step on in which the long prompt came."""
        found = []
        for times in self.arrivals:
            found += [after - before for before, after in pairwise(times) if after > self.came]
        return found

    @property
    def wait(self) -> float:
        """Seconds to the first token of the long prompt."""
        return self.outputs[self.late].metrics.time_to_first_token or 0.0


def show_streams(settings: Settings, engine: LLMEngine, notes: Notes, parts: Any, console: Console) -> list[str]:
    """The gaps with and without pieces, a picture of them, and what the steps were filled with."""
    prompt = long_question(engine)
    budget = engine.engine_core.scheduler.max_num_batched_tokens
    headline(
        console,
        "1. A long prompt comes while others stream",
        f"{some(settings.num_streams, 'answer')} being streamed. When each has {BEFORE} tokens, a prompt of "
        f"{some(len(prompt), 'token')} comes. Two engines: one computes prompts whole, as m4, and all others wait; "
        f"the other gives everybody a token in every step, and cuts the prompt so that a step has at most "
        f"{some(budget, 'token')}.",
    )
    traced = stream_together(engine, settings, prompt)
    with rivals(settings, parts) as engines, console.status("measuring", refresh_per_second=2):
        runs = measure(engines, settings)
    console.print(gap_table(runs))
    console.print(Text(f"The {some(settings.num_streams, 'stream')} only; medians of {ROUNDS} rounds.", style="dim"))
    console.print("\n[bold]The first stream: a mark for each token, time from left to right")
    console.print(timelines({name: middle_run(own) for name, own in runs.items()}))
    console.print(f"\n[bold]What the steps with the long prompt were filled with, of {some(budget, 'token')} each")
    console.print(step_bars(notes, traced.late))
    console.print(Text("D decodes   # tokens of the prompt", style="dim"))
    console.print(Text(f"\n{traced.late}: {traced.outputs[traced.late].text}", style="green"))
    return facts(runs, notes, traced)


@contextmanager
def rivals(settings: Settings, parts: Any) -> Iterator[dict[str, LLMEngine]]:
    """The two engines without a trace and without a cache that would help the second round."""
    cache = replace(settings.cache, prefix_cache="chunk", eviction_policy="lru", debug=False)
    whole = replace(
        settings.scheduler,
        schedule="prefill_first",
        enable_chunked_prefill=False,
        chunked_prefill_size=None,
        target_gap_ms=None,
        max_num_batched_tokens=None,
    )
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                LLMEngine(model_config=settings.model, scheduler_config=own, cache_config=cache, parts=parts)
            )
            for name, own in {WHOLE: whole, PIECES: settings.scheduler}.items()
        }


def measure(engines: Mapping[str, LLMEngine], settings: Settings) -> dict[str, list[Run]]:
    """All rounds on both, in turn. One round more, that does not count, comes first."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for number in range(ROUNDS + 1):
        for name, engine in engines.items():
            run = stream_together(engine, settings, long_question(engine))
            if number:
                runs[name].append(run)
    return runs


def stream_together(engine: LLMEngine, settings: Settings, prompt: list[int]) -> Run:
    """Let the streams begin, then the long prompt come, and step until all have ended."""
    began = time.perf_counter()
    questions = [STREAMS[i % len(STREAMS)] for i in range(settings.num_streams)]
    params = replace(settings.params, ignore_eos=True, max_tokens=min(settings.params.max_tokens, 48))
    rids = [engine.add_request(ask(engine, text), params, **settings.options) for text in questions]
    arrivals: dict[str, list[float]] = {rid: [] for rid in rids}
    outputs: dict[str, RequestOutput] = {}
    late, came = "", 0.0
    while engine.has_unfinished_requests() or not late:
        if not late and all(_has_begun(outputs.get(rid)) for rid in rids):
            came = time.perf_counter() - began
            late = engine.add_request(prompt, several(settings.params, settings.num_answers), **settings.options)
        changed = engine.step()
        now = time.perf_counter() - began
        for rid, output in changed.items():
            outputs[rid] = checked(output)
            if rid in arrivals:
                arrivals[rid].append(now)
    return Run(list(arrivals.values()), outputs, late, came, time.perf_counter() - began)


def _has_begun(output: RequestOutput | None) -> bool:
    """Whether a stream is in the middle of its answer, or has ended already."""
    return output is not None and (output.finished or len(output.token_ids) >= BEFORE)


def middle_run(runs: Sequence[Run]) -> Run:
    """The one whose longest gap is the median."""
    return sorted(runs, key=lambda run: max(run.gaps, default=0.0))[len(runs) // 2]


def gap_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """A line for each engine."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("prompts", "gap, median", "gap, longest", "first token of the long prompt", "all done after"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for name, own in runs.items():
        values = (
            median(median(run.gaps or [0.0]) for run in own),
            median(max(run.gaps, default=0.0) for run in own),
            median(run.wait for run in own),
            median(run.seconds for run in own),
        )
        table.add_row(name, *(f"{value * 1e3:.1f} ms" for value in values))
    return table


def timelines(runs: Mapping[str, Run]) -> Table:
    """The first stream's tokens on one scale."""
    table = Table.grid(padding=(0, 2, 0, 0))
    longest = max(run.arrivals[0][-1] for run in runs.values())
    for name, run in runs.items():
        marks = [" "] * (WIDTH + 1)
        for moment in run.arrivals[0]:
            marks[int(WIDTH * moment / longest)] = "|"
        table.add_row(name, Text("".join(marks), style="green"))
    return table


def step_bars(notes: Notes, late: str) -> Table:
    """A bar for each step in which the long prompt, or a piece of it, ran, and the one before and after."""
    table = Table.grid(padding=(0, 2, 0, 0))
    places = [i for i, (_, batch) in enumerate(notes.batches) if _prefills(batch, late)]
    for step, batch in notes.batches[max(places[0] - 1, 0) : places[-1] + 2]:
        decodes = len(batch.rids) - batch.num_prompts
        said = some(decodes, "decode")
        if batch.num_prompts:
            said += f" + {batch.num_prompt_tokens:,} of the prompt"
        table.add_row(Text(f"step {step}", style="dim"), bar(batch, WIDTH // 2), Text(said))
    return table


def _prefills(batch: Any, late: str) -> bool:
    return any(rid == late or rid.startswith(f"{late}/") for rid in batch.rids[: batch.num_prompts])


def facts(runs: Mapping[str, Sequence[Run]], notes: Notes, traced: Run) -> list[str]:
    """What there is to see in it."""
    longest = {name: median(max(run.gaps, default=0.0) for run in own) for name, own in runs.items()}
    seconds = {name: median(run.seconds for run in own) for name, own in runs.items()}
    waits = {name: median(run.wait for run in own) for name, own in runs.items()}
    said = []
    pieces = [(step, cut) for step, cut in notes.cuts if cut.rid in (traced.late, f"{traced.late}/0")]
    if pieces:
        step, first = pieces[0]
        said.append(
            f"Step {step} took {first.given:,} of the {first.asked:,} tokens of {first.rid}: that was what the decodes "
            f"had left of the budget. It took {some(len(pieces) + 1, 'piece')}; only the last gave it a token."
        )
    if longest[PIECES]:
        said.append(
            f"The longest gap between two tokens of a stream was {longest[WHOLE] * 1e3:.1f} ms with whole prompts and "
            f"{longest[PIECES] * 1e3:.1f} ms with pieces: {longest[WHOLE] / longest[PIECES]:.1f} times as long."
        )
    said.append(
        f"The long prompt shares its steps now: its first token came after {waits[PIECES] * 1e3:.0f} ms, and after "
        f"{waits[WHOLE] * 1e3:.0f} when it ran whole. Everybody was done after {seconds[PIECES] * 1e3:.0f} ms, or "
        f"{seconds[WHOLE] * 1e3:.0f}."
    )
    return said
