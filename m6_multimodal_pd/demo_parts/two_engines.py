"""The last part of the demo's tour: the same batch through engines that share the work.

Some compute prompts, others answer, each in a process of its own; between them the KV of every prompt moves. Part of
`python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import EngineError
from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.stories import as_tokens
from m5_chunked_prefill_spec.demo_parts.stage import STREAMS, headline
from m6_multimodal_pd.demo_parts.batch import run_batch
from m6_multimodal_pd.demo_parts.gantt import show_charts
from m6_multimodal_pd.demo_parts.post import Post, replay
from m6_multimodal_pd.demo_parts.stage import CHANGED, Ask, Settings, about
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.llm_engine import LLMEngine

MOST_LINES = 16
Outputs = Sequence[RequestOutput]


def show_two_engines(
    settings: Settings, group: DisaggregationConfig, asks: Sequence[Ask], number: int, console: Console, **parts: Any
) -> list[str]:
    """Run the batch through one engine, and through a group; returns what there is to see in it. `number`: the part's;
    `parts`: of the one engine."""
    headline(
        console,
        f"{number}. Prefill here, decode there",
        f"The same {some(len(asks), 'request')} once more, through {some(group.prefill, 'engine')} for prompts and "
        f"{some(group.decode, 'engine')} for answers ({group.transport.replace('_', ' ')}), and through one engine for "
        f"both, each with empty caches. A prompt's KV moves page by page, chunk by chunk, while the rest of the prompt "
        f"is still being computed.",
    )
    post, began = Post(), time.perf_counter()
    try:
        together, ready = through_group(settings, group, asks, post, began)
    except EngineError as error:
        console.print(Text(f"The group did not work: {error}", style="yellow"))
        return []
    with LLMEngine(**configs_of(settings), **parts) as engine:
        alone = served(engine, settings, asks)
    if settings.live and console.is_terminal and not console.is_dumb_terminal:
        replay(post, [output.request_id for output in together], console)
        console.print()
    console.print(routes(together, post))
    console.print()
    show_charts({"one engine": alone, "engines that share the work": together}, console)
    console.print()
    show_followed(together, post, console)
    return conclusions(alone, together, group, ready)


def through_group(
    settings: Settings, group: DisaggregationConfig, asks: Sequence[Ask], post: Post, began: float
) -> tuple[Outputs, float]:
    """The answers, and the seconds from `began` until the engines were ready."""
    with LLMEngine(
        disaggregation_config=group, trace_config=TraceConfig(readers=(post,)), **configs_of(settings)
    ) as engine:
        ready = time.perf_counter() - began
        return served(engine, settings, asks, before=post.clear), ready


def served(engine: Any, settings: Settings, asks: Sequence[Ask], before: Callable[[], None] = lambda: None) -> Outputs:
    """The batch, by an engine that has warmed up with something else and forgotten it. `before`: called then."""
    others = [about(CHANGED, "Describe the picture.")] if any(ask.parts for ask in asks) else []
    for number, ask in enumerate([*others, Ask(STREAMS[0])]):
        prompt = as_tokens(engine, ask.messages())
        engine.generate(prompt, SamplingParams(max_tokens=4), request_id=f"warm-up-{number}")
    engine.flush_cache()
    before()
    prompts = [as_tokens(engine, ask.messages()) for ask in asks]
    return run_batch(engine, settings, asks, prompts, lambda _: None)


def configs_of(settings: Settings) -> dict[str, Any]:
    """What one engine and all of a group have in common."""
    return {
        "model_config": settings.model,
        "scheduler_config": settings.scheduler,
        "cache_config": settings.cache,
        "speculative_config": settings.speculative,
        "multimodal_config": settings.multimodal,
    }


def routes(outputs: Outputs, post: Post) -> Table:
    """Who went where."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "prompt", "answer"):
        table.add_column(column)
    for column in ("prompt's tokens", "chunks", "first token", "tokens"):
        table.add_column(column, justify="right")
    for output in outputs:
        routed = post.routed.get(output.request_id) or post.routed.get(f"{output.request_id}/0")
        wait = output.metrics.time_to_first_token
        table.add_row(
            output.request_id,
            routed.prefill if routed else "",
            routed.decode if routed else "",
            f"{output.metrics.num_prompt_tokens:,}",
            str(post.num_chunks(routed.rid) if routed else ""),
            "" if wait is None else f"{wait * 1e3:.0f} ms",
            str(output.metrics.num_output_tokens),
        )
    return table


def show_followed(outputs: Outputs, post: Post, console: Console) -> None:
    """The way of the request whose KV came in most chunks."""
    rid = max((routed for routed in post.routed), key=post.num_chunks, default=None)
    followed = post.of(rid) if rid is not None else []
    if not followed:
        return
    console.print(Text(f"What became of {rid}, in the engines' own words:", style="bold"))
    console.print(bullets([f"{event.engine}: {event.said}" for event in followed[:MOST_LINES]]))
    if len(followed) > MOST_LINES:
        console.print(Text(f"  ... and {some(len(followed) - MOST_LINES, 'line')} more", style="dim"))


def conclusions(alone: Outputs, together: Outputs, group: DisaggregationConfig, ready: float) -> list[str]:
    """What there is to see in it."""
    same = sum(
        [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]
        for mine, theirs in zip(alone, together, strict=True)
    )
    return [
        f"Through {group.prefill} + {group.decode} engines {same} of {some(len(alone), 'request')} got the same answer "
        f"as through one, token for token. The group was ready after {ready:.1f} s.",
        "On one machine the engines share cores and memory. What this is for: no prompt stands in a stream's way.",
    ]
