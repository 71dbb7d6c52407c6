"""Tour of the demo: m2's burst of questions in a KV memory of a few blocks, with a map of them; then m2 and m3.

Part of `python -m m3_paged_attention.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.events import size, some
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.demo_static_batching import Workload, make_workload
from m2_continuous_batching.demo_tour import FIRST, LATE_AFTER, Story, answers_table, make_story, run_story
from m3_paged_attention.block_map import BlockMap, Frame
from m3_paged_attention.config import CacheConfig, ModelConfig, SchedulerConfig
from m3_paged_attention.demo_parts.block_map_facts import facts, highlights, num_slots
from m3_paged_attention.demo_parts.block_map_view import KEY, draw, live_view
from m3_paged_attention.demo_parts.comparison import compare, comparison_table, contest, what_it_shows
from m3_paged_attention.kv_events import BlockCopied, BlocksForked
from m3_paged_attention.llm_engine import LLMEngine
from m3_paged_attention.scheduler_events import Preempted

BLOCK_SIZE = 8  # half of the engine's own, so that more of them change
POOL_TOKENS = 288  # a little less than the tour would fill at most, so that a request is preempted
FORKED = FIRST[1]  # the question that gets several answers
NUM_ANSWERS = 3
PACE = 0.05  # pause after each step on a terminal, in seconds
PAUSE = 0.9  # the same where something happens for the first time


def tour(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    memory: CacheConfig,
    trace: TraceConfig,
    params: SamplingParams,
    console: Console,
    *,
    num_answers: int,
    num_prompts: int,
) -> None:
    """Run both parts of the tour on one engine."""
    block_map = BlockMap()
    with LLMEngine(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=memory,
        trace_config=replace(trace, readers=(*trace.readers, block_map)),
    ) as engine:
        story = fork_one(make_story(engine, most_tokens(engine)), params, num_answers)
        show_block_map(engine, block_map, story, params, console, live=not trace.readers)
        engine.tracer.close()  # what follows is measured without a trace
        text = [token_id for question in story.questions for token_id in question.token_ids]
        show_comparison(engine, make_workload(num_prompts, text, params, longest_prompt=most_tokens(engine)), console)


def most_tokens(engine: LLMEngine) -> int:
    """Return the tokens of the longest prompt that this engine can run."""
    core = engine.engine_core
    pool = core.scheduler.kv_manager.num_blocks * core.scheduler.kv_manager.block_size
    return min(pool, core.scheduler.max_num_batched_tokens)


def fork_one(story: Story, params: SamplingParams, num_answers: int) -> Story:
    """Return m2's questions, one of them with several answers: drawn ones, because greedy ones would all be equal."""
    changes: dict[str, Any] = {"n": num_answers}
    if params.is_greedy:
        changes |= {"temperature": 1.0, "top_p": 0.95, "seed": 6}
    first = [replace(each, changes=changes) if each.title == FORKED else each for each in story.first]
    return replace(story, first=first)


def show_block_map(
    engine: LLMEngine,
    block_map: BlockMap,
    story: Story,
    params: SamplingParams,
    console: Console,
    *,
    live: bool = True,
) -> None:
    """Run the requests, draw the blocks, and print the facts. `live`: also draw every step, on a terminal."""
    console.rule("[bold]1. A burst of requests in a few blocks")
    console.print(f"[italic]{introduction(block_map, story)}[/italic]\n")
    console.print(Text(KEY))
    console.print()
    live = live and console.is_terminal and not console.is_dumb_terminal
    with live_view(block_map, console, pacer()) if live else nullcontext(lambda: None) as step_done:
        outputs = run_story(engine, story, params, step_done)
    for title, frame in highlights(block_map):
        console.print(Text(title[0].upper() + title[1:], style="bold"))
        console.print(draw(frame, console.width))
        console.print()
    console.print(answers_table(story, outputs))
    console.print("\n[bold]What there is to see")
    console.print(bullets(facts(block_map)))


def introduction(block_map: BlockMap, story: Story) -> str:
    """Describe the requests, and the number of m2's slots in the same memory."""
    sized = block_map.sized
    assert sized is not None, "the map has the size of the memory"
    slot_bytes = sized.max_model_len * sized.bytes_per_token
    no_slot = ", and run nothing" if sized.num_bytes < slot_bytes else ""
    several = [
        f"{some(question.changes['n'], 'answer')} to {question.title!r}"
        for question in story.questions
        if question.changes
    ]
    return (
        f"The burst of m2's demo: {some(len(story.first), 'question')} at the start, {len(story.late)} more after step "
        f"{LATE_AFTER}, with {' and '.join(several)}. The KV memory is {some(sized.num_blocks, 'block')} of "
        f"{some(sized.block_size, 'token')}, {size(sized.num_bytes)} with block 0, which is never handed out. m2 keeps "
        f"a slot for each request, as long as the longest may become: {sized.max_model_len:,} tokens x "
        f"{sized.bytes_per_token:,} bytes = {size(slot_bytes)}. So m2 would call our memory "
        f"{num_slots(sized.num_bytes, slot_bytes)} slots{no_slot}."
    )


def show_comparison(engine: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure m3 and m2 on the same requests."""
    console.print()
    console.rule("[bold]2. m2 against m3 on the same requests")
    lengths = [params.max_tokens for params in workload.params]
    console.print(
        f"[italic]{some(len(lengths), 'request')}, all there at the start, with {min(lengths)} to {max(lengths)} "
        f"output tokens: the same ones in each column. m3 has the memory that it had above. "
        f"{some(torch.get_num_threads(), 'CPU thread')}.[/italic]\n"
    )
    with contest(engine, workload) as field:
        with console.status("measuring", refresh_per_second=2):
            measured = compare(field, workload)
        console.print(comparison_table(field, measured))
        console.print()
        console.print(bullets([*field.notes, *what_it_shows(measured)]))


def bullets(sentences: list[str]) -> Table:
    """Return a list with a dash before each item."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    return table


def pacer() -> Callable[[Frame], None]:
    """Trace reader that waits after each frame, longer at the first event of a kind."""
    seen: set[type] = set()

    def pause(frame: Frame) -> None:
        news = {kind for kind in (BlocksForked, BlockCopied, Preempted) if frame.of(kind)} - seen
        seen.update(news)
        time.sleep(PAUSE if news else PACE)

    return pause
