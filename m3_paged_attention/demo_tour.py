"""Tour of the demo: m2's burst of questions in a KV memory of a few blocks, with a map of them; then m2 and m3.

Part of `python -m m3_paged_attention.demo`; no part of the engine depends on it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console, Group
from rich.text import Text

from m1_single_request.config import ModelConfig as FileModelConfig, TraceConfig
from m1_single_request.demo_tour import bullets, headline
from m1_single_request.events import size, some
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching import LLMEngine as SlotEngine, SchedulerConfig as SlotSchedulerConfig
from m2_continuous_batching.demo_comparison import Run, Workload, compared, fastest, make_workload, run, same_answers
from m2_continuous_batching.demo_tour import (
    FIRST,
    LATE,
    LATE_AFTER,
    PACE,
    Question,
    live_view,
    make_story,
    run_story,
    show_answers,
)
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_events import BlockCopied, BlocksForked
from m3_paged_attention.llm_engine import LLMEngine
from m3_paged_attention.scheduler_events import Admit, Preempted
from m3_paged_attention.views.block_map import KEY, BlockMap, Frame, draw

BLOCK_SIZE = 8  # half of the engine's own, so that more of them change
POOL_TOKENS = 288  # a little less than the tour would fill at most, so that a request is preempted
FORKED = FIRST[1]  # the question that gets several answers
NUM_ANSWERS = 3
PAUSE = 0.9  # seconds; on a terminal, where an event happens for the first time


def tour(
    configs: dict[str, Any], trace: TraceConfig, params: SamplingParams, console: Console, *, num_prompts: int
) -> None:
    """Run both parts of the tour on one engine. `params.n` answers are for one question."""
    block_map, single = BlockMap(), replace(params, n=1)
    with LLMEngine(**configs, trace_config=replace(trace, readers=(*trace.readers, block_map))) as engine:
        story = fork_one(make_story(engine, most_tokens(engine)), params)
        show_block_map(engine, block_map, story, single, console, is_live=not trace.readers)
        text = [token_id for question in story for token_id in question.token_ids]
        workload = make_workload(num_prompts, text, single, longest_prompt=most_tokens(engine))
        show_comparison(engine, workload, console)


def most_tokens(engine: LLMEngine) -> int:
    """Return the tokens of the longest prompt that this engine can run."""
    scheduler = engine.engine_core.scheduler
    return min(scheduler.kv_manager.num_blocks * scheduler.kv_manager.block_size, scheduler.max_num_batched_tokens)


# --- 1. the blocks ----------------------------------------------------------------------------------------------------


def fork_one(story: list[Question], params: SamplingParams) -> list[Question]:
    """Return m2's questions, one of them with several answers: drawn ones, because greedy ones would all be equal."""
    changes: dict[str, Any] = {"n": params.n}
    if params.is_greedy:
        changes |= {"temperature": 1.0, "top_p": 0.95, "seed": 6}
    return [replace(each, changes=changes) if each.title == FORKED else each for each in story]


def show_block_map(
    engine: LLMEngine,
    block_map: BlockMap,
    story: list[Question],
    params: SamplingParams,
    console: Console,
    *,
    is_live: bool,
) -> None:
    """Run the requests, draw the blocks at the first event of each kind, and print the facts."""
    assert block_map.sized is not None, "the map has the size of the memory"
    num_answers = max(question.changes.get("n", 1) for question in story)
    headline(console, "1. A burst of requests in a few blocks", introduction(block_map.sized, num_answers))
    console.print(Text(f"{KEY}\n"))

    def latest() -> Group:
        return draw(block_map.frames[-1], console.width, most=6)

    with live_view(console, latest, partial(pause, block_map), is_live=is_live) as step_done:
        outputs = run_story(engine, story, params, step_done)
    engine.tracer.close()
    for title, frame in highlights(block_map):
        console.print(Text(title, style="bold"), draw(frame, console.width), Text(""), sep="\n")
    show_answers(console, story, outputs)
    bullets(console, facts(block_map))


def introduction(sized: KVSized, num_answers: int) -> str:
    """Return a description of the requests, and the number of m2's slots in the same memory."""
    slot_bytes = sized.max_model_len * sized.bytes_per_token
    return (
        f"The burst of m2's demo: {len(FIRST)} questions at the start, {len(LATE)} more after step {LATE_AFTER}, with "
        f"{num_answers} answers to {FORKED!r}. The KV memory is {some(sized.num_blocks, 'block')} of "
        f"{some(sized.block_size, 'token')}, {size(sized.num_bytes)} with block 0, which is never handed out. m2 keeps "
        f"a slot for each request, as long as the longest may become: {sized.max_model_len:,} tokens, "
        f"{size(slot_bytes)}. For m2 this memory is {sized.num_bytes / slot_bytes:.2f} slots."
    )


def highlights(block_map: BlockMap) -> list[tuple[str, Frame]]:
    """Return the first frame of each kind of change of blocks, and the fullest, with a title, in their order."""
    frames = {
        "A prompt is stored once for several answers (fork)": [f for f, _ in block_map.of(BlocksForked)],
        "Their ways part (copy on write)": [f for f, _ in block_map.of(BlockCopied)],
        "The memory is full (preemption)": [f for f, _ in block_map.of(Preempted)],
        "A preempted request comes back": [
            f for f, admit in block_map.of(Admit) if admit.how == "swap_in" or admit.num_output_tokens
        ],
        "Most requests in flight": [fullest(block_map)],
    }
    return sorted(((title, found[0]) for title, found in frames.items() if found), key=lambda pair: pair[1].step)


def fullest(block_map: BlockMap) -> Frame:
    """Return the first frame with most requests in flight."""
    return max(block_map.frames, key=lambda frame: len(frame.tables))


def facts(block_map: BlockMap) -> list[str]:
    """Return the sums of a run in sentences."""
    frame, sized = fullest(block_map), block_map.sized
    slots = sum(each.num_used * each.block_size for each in block_map.frames)
    held = sum(block.num_tokens for each in block_map.frames for block in each.blocks)
    said = [
        f"Reserved for nothing: {1 - held / max(1, slots):.0%} of the places in used blocks, over all steps. They are "
        f"the ends of last blocks, at most {frame.block_size - 1} places per request."
    ]
    if sized is not None:
        bytes_in_m2 = len(frame.tables) * sized.max_model_len * sized.bytes_per_token
        said.append(
            f"Step {frame.step} has the most requests in flight, {len(frame.tables)}, in {frame.num_used} blocks. As "
            f"many slots of m2 take {size(bytes_in_m2)}; all blocks together take {size(sized.num_bytes)}."
        )
    return [*said, f"Preemptions: {len(list(block_map.of(Preempted)))}. No output token was lost."]


def pause(block_map: BlockMap) -> float:
    """Return the seconds to wait after the last frame: more at the first event of a kind."""
    *before, last = block_map.frames
    kinds = (BlocksForked, BlockCopied, Preempted)
    is_first = any(last.of(kind) and not any(frame.of(kind) for frame in before) for kind in kinds)
    return PAUSE if is_first else PACE


# --- 2. the comparison ------------------------------------------------------------------------------------------------


def show_comparison(engine: LLMEngine, workload: Workload, console: Console) -> None:
    """Measure m3, and m2 with as many slots as fit into the same memory, on the same requests."""
    num_slots, num_tokens = slots_of_m2(engine, workload)
    headline(
        console,
        "2. m2 against m3 on the same bytes",
        f"{some(len(workload), 'request')}, all there at the start; {some(torch.get_num_threads(), 'CPU thread')}. m2 "
        f"has {some(num_slots, 'slot')} of {num_tokens} tokens, the length of the longest request of this workload, "
        f"which no engine knows beforehand. m3 has its blocks.",
    )
    if engine.config.model.load_format == "dummy" or not num_slots:
        bullets(console, ["Nothing is compared: m2 needs the files of a model, and memory for a slot."])
        return
    model = engine.config.model
    config = FileModelConfig(
        model=model.model, device=model.device, dtype=model.dtype, seed=model.seed, max_model_len=num_tokens
    )
    limits = SlotSchedulerConfig(max_num_seqs=num_slots)
    with SlotEngine(model_config=config, scheduler_config=limits) as m2, console.status("measuring"):
        ways = {"m2": m2, "m3": engine}
        runs = fastest({name: partial(run, each, workload, len(workload)) for name, each in ways.items()})
    rows: dict[str, Callable[[Run], str]] = {
        "in flight, at most": lambda own: str(max(stats.num_running for stats in own.stats)),
        "  on average": lambda own: f"{own.mean(lambda stats: stats.num_running):.1f}",
        "keys and values, on average": lambda own: size(round(own.mean(lambda stats: stats.kv_bytes))),
        "steps": lambda own: f"{len(own.stats):,}",
        "tokens per second": lambda own: f"{own.tokens_per_second:,.0f}",
    }
    console.print(compared(runs, rows))
    bullets(console, [*conclusions(runs["m2"], runs["m3"]), same_answers(runs)])


def slots_of_m2(engine: LLMEngine, workload: Workload) -> tuple[int, int]:
    """Return the number of m2's slots that fit into the memory of m3, and their length, that of the longest request."""
    core = engine.engine_core
    longest = max(len(prompt) + params.max_tokens for prompt, params in workload)
    num_tokens = min(longest, core.input_processor.max_model_len)
    pool = core.scheduler.kv_manager
    return (pool.num_blocks + 1) * pool.block_size // num_tokens, num_tokens  # with block 0


def conclusions(m2: Run, m3: Run) -> list[str]:
    """Return the differences in sentences."""
    if len(m2.stats) <= len(m3.stats):
        return ["m2 needs no more steps: no request had to wait for a slot. Try more requests: --num-prompts."]
    return [
        f"m2 takes {len(m2.stats) / len(m3.stats):.2f} times as many steps as m3: a slot is reserved to its end from "
        f"the start, a block when it is needed.",
        f"m3 makes {m3.tokens_per_second / m2.tokens_per_second:.1f} times as many tokens per second. That has a "
        f"second cause: m2 runs the network of transformers, m3 its own.",
    ]
