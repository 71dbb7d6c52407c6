"""The last part of the demo's tour, with `--pd`: the same batch through engines that share the work.

Some compute prompts, others answer, each in a process of its own; between them the KV of every prompt moves. Part of
`python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.events import some
from m1_single_request.outputs import RequestMetrics, RequestOutput
from m1_single_request.tracer import TraceRecord
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.stories import as_tokens
from m5_chunked_prefill_spec.demo_parts.stage import headline
from m6_multimodal_pd.demo_parts.batch import run_batch
from m6_multimodal_pd.demo_parts.stage import Ask, Settings
from m6_multimodal_pd.disaggregation.events import EngineJoined, EngineLost, Reported, RequestRouted
from m6_multimodal_pd.llm_engine import LLMEngine

WIDTH = 56
"""Columns of a chart."""
KINDS = ("room_taken", "kv_poll_changed", "chunk_sent", "chunk_received")
"""Of the events of a transfer."""
MOST_LINES = 10


class Post:
    """A trace reader that remembers who got what, and what was said of each transfer."""

    def __init__(self) -> None:
        self.engines: list[EngineJoined | EngineLost] = []
        self.routed: dict[str, RequestRouted] = {}
        self.transfers: list[Reported] = []
        self.steps: dict[str, int] = {}
        """By engine: the last step that it has told of."""

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if isinstance(event, EngineJoined | EngineLost):
            self.engines.append(event)
        elif isinstance(event, RequestRouted):
            self.routed[event.rid] = event
        elif isinstance(event, Reported):
            self.steps[event.engine] = event.its_step
            if event.what in KINDS:
                self.transfers.append(event)

    def close(self) -> None:
        """Nothing to let go of."""


def show_two_engines(
    settings: Settings, asks: Sequence[Ask], before: Sequence[RequestOutput], number: int, console: Console
) -> list[str]:
    """Run the batch once more, through a group of engines; returns what there is to see in it. `number`: the part's."""
    group = settings.disaggregation
    assert group is not None
    headline(
        console,
        f"{number}. Prefill here, decode there",
        f"The same {some(len(asks), 'request')} once more, through {some(group.prefill, 'engine')} for prompts and "
        f"{some(group.decode, 'engine')} for answers ({group.transport.replace('_', ' ')}). A prompt's KV moves page "
        f"by page, chunk by chunk, while the rest of the prompt is still being computed.",
    )
    post, began = Post(), time.perf_counter()
    with LLMEngine(
        model_config=settings.model,
        scheduler_config=settings.scheduler,
        cache_config=settings.cache,
        speculative_config=settings.speculative,
        multimodal_config=settings.multimodal,
        disaggregation_config=group,
        trace_config=TraceConfig(readers=(post,)),
    ) as engine:
        ready = time.perf_counter() - began
        prompts = [as_tokens(engine, ask.messages()) for ask in asks]
        live = settings.live and console.is_terminal and not console.is_dumb_terminal
        with watched(engine, post, console) if live else nobody() as said:
            outputs = run_batch(engine, settings, asks, prompts, said)
        stats = engine.stats()
    console.print(routes(outputs, post))
    console.print(Text("one engine", style="bold"))
    total = max(duration(before), duration(outputs))
    console.print(chart(before, total))
    console.print(Text("engines that share the work", style="bold"))
    console.print(chart(outputs, total))
    console.print(Text("░ until the first token   █ until the last one", style="dim"))
    console.print()
    followed = [event for event in post.transfers if event.rids == (outputs[0].request_id,)]
    if followed:
        console.print(Text(f"What became of {outputs[0].request_id}, in the engines' own words:", style="bold"))
        console.print(bullets([f"{event.engine}: {event.said}" for event in followed[:MOST_LINES]]))
        console.print()
    same = sum(
        [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]
        for mine, theirs in zip(before, outputs, strict=True)
    )
    return [
        f"Through {group.prefill} + {group.decode} engines {same} of {some(len(asks), 'request')} got the same answer, "
        f"token for token. The engines were ready after {ready:.1f} s.",
        f"Together they have computed {stats.num_prompt_tokens:,} prompt tokens. On one machine this wins nothing, for "
        f"the engines share its cores; what it is for is that no prompt ever stands in a decode's way.",
    ]


def routes(outputs: Sequence[RequestOutput], post: Post) -> Table:
    """Who went where."""
    table = Table(box=None)
    for column in ("", "prompt", "answer"):
        table.add_column(column)
    table.add_column("first token", justify="right")
    table.add_column("tokens", justify="right")
    for output in outputs:
        routed = post.routed.get(output.request_id) or post.routed.get(f"{output.request_id}/0")
        wait = output.metrics.time_to_first_token
        table.add_row(
            output.request_id,
            routed.prefill if routed else "",
            routed.decode if routed else "",
            "" if wait is None else f"{wait * 1e3:.0f} ms",
            str(output.metrics.num_output_tokens),
        )
    return table


def duration(outputs: Sequence[RequestOutput]) -> float:
    """Seconds from the first arrival to the last end."""
    begin = min(output.metrics.arrival_time for output in outputs)
    return max((output.metrics.finished_time or begin) - begin for output in outputs)


def chart(outputs: Sequence[RequestOutput], total: float) -> Table:
    """A bar for each request, from its arrival to its end; `total`: the seconds of the whole width."""
    begin = min(output.metrics.arrival_time for output in outputs)
    table = Table.grid(padding=(0, 1, 0, 0))
    for output in outputs:
        table.add_row(output.request_id, Text(bar(output.metrics, begin, max(total, 1e-9))))
    table.add_row("", Text(f"0{f'{total * 1e3:.0f} ms':>{WIDTH - 1}}", style="dim"))
    return table


def bar(metrics: RequestMetrics, begin: float, total: float) -> str:
    """One of them."""

    def column(at: float | None) -> int:
        return round(WIDTH * ((metrics.arrival_time if at is None else at) - begin) / total)

    arrival, first, last = column(None), column(metrics.first_token_time), column(metrics.finished_time)
    return " " * arrival + "░" * (first - arrival) + "█" * max(last - first, 1)


@contextmanager
def watched(engine: Any, post: Post, console: Console) -> Any:
    """A table of the engines that is drawn anew after every step."""
    with Live(console=console, transient=True, refresh_per_second=20) as live:

        def draw(_: object) -> None:
            table = Table("engine", "steps", "running", "waiting", "free tokens", box=None)
            for name, member in sorted(engine.engine_core.router.members.items()):
                beat = member.heartbeat
                steps = str(post.steps.get(name, 0))
                numbers = [] if beat is None else [beat.num_running, beat.num_waiting, f"{beat.free_tokens:,}"]
                table.add_row(name, steps, *map(str, numbers))
            live.update(table)

        yield draw


@contextmanager
def nobody() -> Any:
    """Nothing is drawn."""
    yield lambda _: None
