"""The last part of the demo's tour: the same batch through engines that share the work.

Some compute prompts, others answer, each in a process of its own; between them the KV of every prompt moves. Part of
`python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import EngineError
from m1_single_request.events import size, some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.stories import as_tokens
from m5_chunked_prefill_spec.demo_parts.stage import STREAMS, checked, headline
from m6_multimodal_pd.demo_parts.batch import run_batch
from m6_multimodal_pd.demo_parts.engines_view import replay, watched
from m6_multimodal_pd.demo_parts.gantt import duration, show_charts
from m6_multimodal_pd.demo_parts.post import Board, Post, Transfer
from m6_multimodal_pd.demo_parts.stage import CHANGED, Ask, Settings, about
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.llm_engine import LLMEngine

MOST_LINES, LAST_LINES = 20, 4
"""Of what is told of one request: in all, and behind what is left out."""
Outputs = Sequence[RequestOutput]


def show_two_engines(
    settings: Settings, group: DisaggregationConfig, asks: Sequence[Ask], number: int, console: Console, **parts: Any
) -> list[str]:
    """Run the batch through one engine, and through a group; returns what there is to see in it. `number`: the part's;
    `parts`: of the one engine."""
    headline(console, f"{number}. Prefill here, decode there", introduction(asks, group))
    console.print(Text(awaited(group), style="dim"))
    console.print()
    post, is_live = Post(), settings.live and console.is_terminal and not console.is_dumb_terminal
    try:
        together, ready = through_group(settings, group, asks, post, console if is_live else None)
    except EngineError as error:
        console.print(Text(f"The group did not work: {error}", style="yellow"))
        return []
    with LLMEngine(**configs_of(settings), **parts) as engine:
        warm_up(engine, asks)
        alone = served(engine, settings, asks)
    if is_live:
        replay(post, console)
        console.print()
    board = post.board
    console.print(routes(together, board))
    console.print()
    show_followed(board, post, console)
    show_charts({"one engine (aggregated)": alone, "engines that share the work (disaggregated)": together}, console)
    return [*agreement(alone, together, group, ready), *moved(board), meaning(alone, together)]


def introduction(asks: Sequence[Ask], group: DisaggregationConfig) -> str:
    """What is done."""
    return (
        f"The same {some(len(asks), 'request')} once more, through {some(group.prefill, 'engine')} for prompts and "
        f"{some(group.decode, 'engine')} for answers ({group.transport.replace('_', ' ')}), and through one engine for "
        f"both, each with empty caches. Before an engine can answer, it must have the prompt's KV: that moves in "
        f"chunks of whole pages, and what is complete leaves while the rest of the prompt is still being computed."
    )


def awaited(group: DisaggregationConfig) -> str:
    """What happens until they are ready."""
    engines = some(group.prefill + group.decode, "engine")
    if group.address is not None:
        return f"{engines} may join at {group.address} now ..."
    if group.transport == "in_process":
        return f"{engines} in this process share one model, and work in turns ..."
    return f"{engines} start, each a process that loads the model ..."


def through_group(
    settings: Settings, group: DisaggregationConfig, asks: Sequence[Ask], post: Post, console: Console | None
) -> tuple[Outputs, float]:
    """The answers, and the seconds until the engines were ready. `console`: where they are watched, if anywhere.

    Raises `EngineError`.
    """
    began = time.perf_counter()
    with LLMEngine(
        disaggregation_config=group, trace_config=TraceConfig(readers=(post,)), **configs_of(settings)
    ) as engine:
        ready = time.perf_counter() - began
        warm_up(engine, asks)
        post.clear()
        with unwatched() if console is None else watched(post, engine, console) as after_step:
            return served(engine, settings, asks, after_step), ready


@contextmanager
def unwatched() -> Iterator[Callable[[object], None]]:
    """Nothing is drawn."""
    yield lambda _: None


def warm_up(engine: Any, asks: Sequence[Ask]) -> None:
    """Something else goes through all parts of an engine, and is forgotten. Raises `EngineError`."""
    others = [about(CHANGED, "Describe the picture.")] if any(ask.parts for ask in asks) else []
    for number, ask in enumerate([*others, Ask(STREAMS[0])]):
        prompt = as_tokens(engine, ask.messages())
        checked(engine.generate(prompt, SamplingParams(max_tokens=4), request_id=f"warm-up-{number}"))
    engine.flush_cache()


def served(
    engine: Any, settings: Settings, asks: Sequence[Ask], after_step: Callable[[object], None] = lambda _: None
) -> Outputs:
    """The batch, by this engine. Raises `EngineError`."""
    return run_batch(engine, settings, asks, [as_tokens(engine, ask.messages()) for ask in asks], after_step)


def configs_of(settings: Settings) -> dict[str, Any]:
    """What one engine and all of a group have in common."""
    return {
        "model_config": settings.model,
        "scheduler_config": settings.scheduler,
        "cache_config": settings.cache,
        "speculative_config": settings.speculative,
        "multimodal_config": settings.multimodal,
    }


def routes(outputs: Outputs, board: Board) -> Table:
    """Who went where."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "prompt", "answer"):
        table.add_column(column)
    for column in ("prompt's tokens", "chunks", "first token", "tokens"):
        table.add_column(column, justify="right")
    of = {own.rid.partition("/")[0]: own for own in reversed(board.transfers.values())}
    for output in outputs:
        own, wait = of[output.request_id], output.metrics.time_to_first_token
        table.add_row(
            output.request_id,
            own.prefill,
            own.decode,
            f"{output.metrics.num_prompt_tokens:,}",
            str(own.num_received),
            "" if wait is None else f"{wait * 1e3:.0f} ms",
            str(output.metrics.num_output_tokens),
        )
    return table


def most_chunks(board: Board) -> Transfer:
    """The request whose KV came in most of them."""
    return max(board.transfers.values(), key=lambda own: own.num_received)


def show_followed(board: Board, post: Post, console: Console) -> None:
    """The way of one request, told by the engines."""
    followed = most_chunks(board)
    said = post.of(followed)
    console.print(
        Text(f"How the KV of {followed.rid} moved, in the engines' own words, cause before effect:", style="bold")
    )
    console.print(Text("A room is the number of one transfer, which both engines know it by.", style="dim"))
    lines = [f"{own.engine}, step {own.its_step}: {own.text}" for own in said]
    if len(lines) > MOST_LINES:
        left_out = len(lines) - MOST_LINES
        lines[-LAST_LINES - left_out : -LAST_LINES] = [f"... {some(left_out, 'line')} ..."]
    console.print(bullets(lines))
    console.print()


def agreement(alone: Outputs, together: Outputs, group: DisaggregationConfig, ready: float) -> list[str]:
    """Whether it made a difference to an answer."""
    same = sum(
        [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]
        for mine, theirs in zip(alone, together, strict=True)
    )
    return [
        f"Through {group.prefill} + {group.decode} engines {same} of {some(len(alone), 'request')} got the same answer "
        f"as through one, token for token. The group was ready after {ready:.1f} s."
    ]


def moved(board: Board) -> list[str]:
    """What went from engine to engine."""
    transfers = list(board.transfers.values())
    chunks, pages = sum(own.num_received for own in transfers), sum(own.num_pages for own in transfers)
    said = (
        f"The KV of {some(len(transfers), 'prompt')} moved in {some(chunks, 'chunk')}: {some(pages, 'page')}, "
        f"{size(sum(own.num_bytes for own in transfers))}."
    )
    own = most_chunks(board)
    steps = [step for _, step in own.sent.values()]
    if len(set(steps)) > 1:
        said += (
            f" That of {own.rid} left {own.prefill} in {some(len(steps), 'chunk')}, the first in its step {steps[0]}, "
            f"the last in its step {steps[-1]}: what leaves early moves while the rest is being computed."
        )
    return [said]


def meaning(alone: Outputs, together: Outputs) -> str:
    """What the charts say, and what they cannot say."""
    one, several = duration(alone) * 1e3, duration(together) * 1e3
    return (
        f"From the first arrival to the last token it took one engine {one:.0f} ms, and engines that share the work "
        f"{several:.0f} ms. On one machine they share its cores and its memory, too, and their messages come on top; "
        f"what this is for, in larger systems, is a machine for each, where no prompt takes time from an answer."
    )
