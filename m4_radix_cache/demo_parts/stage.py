"""What the parts of the demo's tour work with, and how they print what they have in common.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.config import ModelConfig
from m4_radix_cache.config import CacheConfig, SchedulerConfig
from m4_radix_cache.demo_parts.cache_notes import CacheNotes
from m4_radix_cache.demo_parts.measure import WITH, WITHOUT, Measured
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.tree_view import TreeView

LEAST_GAIN = 1.05  # a smaller one is not told from noise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the flags say."""

    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    """Of parts 1 and 2, which have plenty of memory."""
    little_scheduler: SchedulerConfig
    """Of part 3."""
    little_cache: CacheConfig
    """Of part 3."""
    trace: TraceConfig
    params: SamplingParams
    num_users: int
    """In part 1."""
    num_answers: int
    """To the question of the last of them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request."""


@dataclass(frozen=True)
class Stage:
    """A part's engine, its trace, and where it prints."""

    engine: LLMEngine
    notes: CacheNotes
    view: TreeView
    settings: Settings
    console: Console

    def show_cache(self) -> None:
        """Draw what is cached now."""
        self.console.print(self.view.draw(self.tokenizer))

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, for texts of the cache."""
        return self.engine.engine_core.input_processor.tokenizer

    def headline(self, title: str, introduction: str) -> None:
        """Begin a part."""
        self.console.rule(f"[bold]{title}")
        self.console.print(Text(introduction, style="italic"))
        self.console.print()


@dataclass(frozen=True)
class Row:
    """A request: how many of its tokens were in the cache, how many were computed, and how long it waited."""

    name: str
    title: str
    reused: int
    computed: int
    waits: Mapping[str, float]
    """Seconds to the first token, by engine."""


def reuse_table(rows: Sequence[Row], engines: Sequence[str]) -> Table:
    """A line for each request, and a column of times for each engine."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("question", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in ("prompt", "reused", "computed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in engines:
        table.add_column(f"TTFT\n{name}", justify="right", no_wrap=True)
    for row in rows:
        waits = [f"{row.waits[name] * 1e3:.1f} ms" if name in row.waits else "" for name in engines]
        counts = (row.reused + row.computed, row.reused, row.computed)
        table.add_row(row.name, Text(row.title), *(f"{count:,}" for count in counts), *waits)
    return table


def answers_table(outputs: Sequence[RequestOutput]) -> Table:
    """What was said, as far as a line goes."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for output in outputs:
        for name, answer in zip(answer_ids(output), output.outputs, strict=True):
            table.add_row(name, Text(" ".join(answer.text.split()), style="green"))
    return table


def answer_ids(output: RequestOutput) -> list[str]:
    """The request ids of the answers, as the trace calls them: with several each has its own."""
    if len(output.outputs) == 1:
        return [output.request_id]
    return [f"{output.request_id}/{answer.index}" for answer in output.outputs]


def steps_table(told: Sequence[tuple[int, str]]) -> Table:
    """Sentences, each behind its step; a step is named once."""
    table = Table.grid(padding=(0, 2, 0, 0))
    last = 0
    for step, sentence in told:
        table.add_row(Text(f"step {step}" if step != last else "", style="dim"), Text(sentence))
        last = step
    return table


def faster(where: str, measured: Mapping[str, Measured], rows: Sequence[int] | None = None) -> str | None:
    """The mean times to the first token of these rows or all, if there are two to compare."""
    if not {WITH, WITHOUT} <= measured.keys() or rows == []:
        return None
    with_cache, without = measured[WITH].mean(rows), measured[WITHOUT].mean(rows)
    ratio = without / with_cache
    gain = f"{ratio:.1f} times as long" if ratio >= LEAST_GAIN else "the cache gained nothing here"
    return (
        f"{where} the first token came after {with_cache * 1e3:.1f} ms with the cache, on average, and after "
        f"{without * 1e3:.1f} ms without: {gain}."
    )
