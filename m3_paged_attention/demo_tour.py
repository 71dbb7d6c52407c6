"""Tour of the demo: m2's burst of questions in a KV memory of a few blocks, with a map of them; then m2 and m3.

Part of `python -m m3_paged_attention.demo`; no part of the engine depends on it. The remark that opens a part is the
text of its function's docstring.
"""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from rich.console import Console, Group
from rich.text import Text

from m1_single_request.config import ModelConfig as FileModelConfig
from m1_single_request.demo_tour import bullets, prompt_of
from m1_single_request.errors import ModelLoadError
from m1_single_request.events import size, some
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching import LLMEngine as SlotEngine, SchedulerConfig as SlotSchedulerConfig, demo_tour as m2_tour
from m2_continuous_batching.demo_tour import Run, Workload, open_part
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_events import BlockCopied, BlocksForked
from m3_paged_attention.llm_engine import LLMEngine
from m3_paged_attention.scheduler_events import Admit, Preempted
from m3_paged_attention.views.block_map import KEY, BlockMap, Frame, draw

BLOCK_SIZE = 8  # half of the engine's own, so that more of them change
POOL_TOKENS = 288  # a little less than the tour would fill at most, so that a request is preempted
FORKED = m2_tour.FIRST[1]  # the question that gets several answers
NUM_ANSWERS = 3
Config = TypeVar("Config", bound=Any)


def with_room(config: Config, **size: int) -> Config:
    """Return `config` with this size of the KV memory, unless it has one."""
    names = (*size, "kv_cache_memory_bytes", "gpu_memory_utilization")
    return config if any(getattr(config, name) is not None for name in names) else replace(config, **size)


def tour(configs: dict[str, Any], params: SamplingParams, console: Console, *, num_prompts: int) -> None:
    """Run m2's questions, draw the blocks at the first event of each kind, and print facts; then compare with m2.

    The burst of m2's demo, with {answers} answers to {forked!r}. The KV memory is {sized.num_blocks} blocks of
    {sized.block_size} tokens, {memory} with block 0, which is never allocated. A slot of m2 is as long as the longest
    request may become: {sized.max_model_len:,} tokens, {slot}. For m2 this memory is {slots:.2f} slots.
    """
    block_map, single, trace = BlockMap(), replace(params, n=1), configs["trace_config"]

    def latest() -> Group:
        return Group(*(draw(frame, console.width, most=6) for frame in block_map.frames[-1:]))

    configs = {**configs, "trace_config": replace(trace, readers=(*trace.readers, block_map))}
    with LLMEngine(**configs) as engine:
        sized = block_map.sized
        assert sized is not None, "a map that is attached from the start has the size of the memory"
        slot_bytes, asked = sized.max_model_len * sized.bytes_per_token, {"forked": FORKED, "answers": params.n}
        memory = {"memory": size(sized.num_bytes), "slot": size(slot_bytes), "slots": sized.num_bytes / slot_bytes}
        open_part(console, "1. A burst of requests in a few blocks", tour, **asked, **memory, sized=sized)
        console.print(Text(f"{KEY}\n"))
        budget = engine.engine_core.scheduler.max_num_batched_tokens
        longest = min(sized.num_blocks * sized.block_size, budget)
        story = m2_tour.make_story(engine, single, longest)
        story = [replace(each, params=several(params)) if each.text == FORKED else each for each in story]
        outputs = m2_tour.run_story(engine, story, console, latest)
        engine.tracer.close()
        for title, frame in highlights(block_map.frames):
            console.print(Text(title, style="bold"), draw(frame, console.width), Text(""), sep="\n")
        m2_tour.show_answers(console, story, outputs)
        bullets(console, facts(block_map.frames, sized))
        text = prompt_of(engine, "".join(m2_tour.FACTS))
        workload = m2_tour.make_workload(num_prompts, text, single, longest_prompt=longest)
        show_comparison(engine, sized, workload, console)


# --- 1. the blocks ----------------------------------------------------------------------------------------------------


def several(params: SamplingParams) -> SamplingParams:
    """Return `params` for several answers: drawn ones, because greedy ones would all be the same."""
    return replace(params, temperature=1.0, top_p=0.95, seed=6) if params.n > 1 and params.is_greedy else params


def highlights(frames: list[Frame]) -> list[tuple[str, Frame]]:
    """Return the first frame of each kind of change of blocks, and the fullest, with a title, in their order."""
    found = {
        "A prompt is stored once for several answers (fork)": [f for f in frames if f.of(BlocksForked)],
        "Two answers differ: one gets a block of its own (copy on write)": [f for f in frames if f.of(BlockCopied)],
        "The memory is full (preemption)": [f for f in frames if f.of(Preempted)],
        "A preempted request runs again": [
            f for f in frames if any(admit.how == "swap_in" or admit.num_output_tokens for admit in f.of(Admit))
        ],
        "Most requests in flight": [fullest(frames)],
    }
    return sorted(((title, those[0]) for title, those in found.items() if those), key=lambda pair: pair[1].step)


def fullest(frames: list[Frame]) -> Frame:
    """Return the first frame with most requests in flight."""
    return max(frames, key=lambda frame: len(frame.tables))


def facts(frames: list[Frame], sized: KVSized) -> list[str]:
    """Return the sums of a run in sentences."""
    most = fullest(frames)
    places = sum(each.num_used * each.block_size for each in frames)
    held = sum(block.num_tokens for each in frames for block in each.blocks)
    bytes_in_m2 = len(most.tables) * sized.max_model_len * sized.bytes_per_token
    return [
        f"Reserved and empty: {1 - held / max(1, places):.0%} of the places in used blocks, over all steps. They are "
        f"the ends of last blocks, at most {most.block_size - 1} places per request.",
        f"Step {most.step} has the most requests in flight, {len(most.tables)}, in {most.num_used} blocks. As many "
        f"slots of m2 take {size(bytes_in_m2)}; all blocks together take {size(sized.num_bytes)}.",
        f"Preemptions: {sum(len(each.of(Preempted)) for each in frames)}. No output token was lost.",
    ]


# --- 2. the comparison ------------------------------------------------------------------------------------------------


def show_comparison(engine: LLMEngine, sized: KVSized, workload: Workload, console: Console) -> None:
    """Measure m3, and m2 with as many slots as fit into the same memory, on the same requests.

    {requests}, all of which wait from the start; {threads}. m2 has {slots} of {tokens} tokens, the length of the
    longest request of this workload, which no engine knows beforehand. m3 has its blocks.
    """
    num_tokens = min(max(len(prompt) + own.max_tokens for prompt, own in workload), sized.max_model_len)
    num_slots = (sized.num_blocks + 1) * sized.block_size // num_tokens  # with block 0
    requests, threads = some(len(workload), "request"), some(torch.get_num_threads(), "CPU thread")
    numbers = {"requests": requests, "threads": threads, "slots": some(num_slots, "slot"), "tokens": num_tokens}
    open_part(console, "2. m2 against m3 on the same bytes", show_comparison, **numbers)
    model = engine.config.model
    if model.load_format == "dummy" or not num_slots:
        bullets(console, ["Nothing is compared: m2 needs the files of a model, and memory for a slot."])
        return
    config = FileModelConfig(model=model.model, device=model.device, dtype=model.dtype, max_model_len=num_tokens)
    try:
        slot_engine = SlotEngine(model_config=config, scheduler_config=SlotSchedulerConfig(max_num_seqs=num_slots))
    except ModelLoadError as error:  # of a model with experts, for example
        bullets(console, [f"Nothing is compared: {error}."])
        return
    with slot_engine as m2:
        sides = {"m2": (m2, len(workload)), "m3": (engine, len(workload))}
        slots, blocks = m2_tour.compare(workload, sides, console).values()
    bullets(console, [*conclusions(slots, blocks), m2_tour.same_answers(slots.token_ids, blocks.token_ids)])


def conclusions(m2: Run, m3: Run) -> list[str]:
    """Return the differences in sentences."""
    if len(m2.stats) <= len(m3.stats):
        return ["m2 needs no more steps than m3 here. Try more requests: --num-prompts."]
    return [
        f"m2 takes {len(m2.stats) / len(m3.stats):.2f} times as many steps as m3: a slot is reserved to its end from "
        f"the start, a block when it is needed.",
        f"m3 makes {m3.tokens_per_second / m2.tokens_per_second:.1f} times as many tokens per second. That has a "
        f"second cause: m2 runs the network of transformers, m3 its own.",
    ]
