"""Demo of m3, many requests in little memory: `python -m m3_paged_attention.demo`.

Without --prompt and --chat: m2's burst of questions in 36 blocks of 8 tokens, less than a tenth of one of m2's slots,
with a map of the blocks at every step, and 3 answers to one question; then m2 and m3 measured on the same requests.
With --trace-experts, for a model that has experts, also a map of those that the tokens of a step have used.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m1_single_request.flags import config_of
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching import demo as m2
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.config import CacheConfig, ModelConfig, SchedulerConfig, TraceConfig
from m3_paged_attention.demo_tour import BLOCK_SIZE, NUM_ANSWERS, POOL_TOKENS, tour, with_room
from m3_paged_attention.llm_engine import LLMEngine
from m3_paged_attention.views.expert_map import KEY, ExpertMap, draw

CLASSES = {"model": ModelConfig, "scheduler": SchedulerConfig, "cache": CacheConfig, "trace": TraceConfig}
"""Configuration classes of an engine that have flags, by their fields in `EngineConfig`."""
FLAGS: m1.Flags = {
    "model": (ModelConfig, f"{m1.FLAGS['model'][1]} load_format attention_backend quantization"),
    "sampling": (SamplingParams, f"{m1.FLAGS['sampling'][1]} n"),
    "batching": (SchedulerConfig, "max_num_seqs max_num_batched_tokens preemption_mode=--preemption"),
    "KV memory": (CacheConfig, "block_size num_blocks kv_cache_memory_bytes gpu_memory_utilization kv_cache_dtype"),
    "trace": (TraceConfig, "experts=--trace-experts"),
    "demo": m2.FLAGS["demo"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m3_paged_attention.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    configs, experts = m1.configs_of(args, console, **CLASSES), ExpertMap()
    trace = configs["trace_config"]
    if trace.experts:
        configs["trace_config"] = replace(trace, readers=(*trace.readers, experts))
    answer(args, console, configs)
    show_experts(experts, console)


def answer(args: argparse.Namespace, console: Console, configs: dict[str, Any]) -> None:
    """Run an engine with these configurations for `run`."""
    demo, params = config_of(args, m2.DemoConfig), answer_params(args)
    if m1.is_tour(args):
        cache = config_of(args, CacheConfig, block_size=BLOCK_SIZE)
        configs["cache_config"] = with_room(cache, num_blocks=blocks_for(POOL_TOKENS, cache.block_size))
        tour(configs, config_of(args, SamplingParams, n=NUM_ANSWERS), console, num_prompts=demo.num_prompts)
        return
    with LLMEngine(**configs) as engine:
        m1.Conversation(engine, params, console).run(args)


def show_experts(experts: ExpertMap, console: Console) -> None:
    """Draw the experts of the step with most tokens, and of the last one; nothing if none were recorded."""
    if experts.frames:
        most = max(experts.frames, key=lambda frame: frame.used.num_tokens)
        console.print(Text(f"\n{KEY}\n"))
        for frame in dict.fromkeys([most, experts.frames[-1]]):
            console.print(draw(frame, console.width), "")


def answer_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the flags. Raises `ConfigError` for a chat with several answers."""
    params = config_of(args, SamplingParams)
    if args.chat and params.n > 1:
        raise ConfigError(f"n={params.n}: a conversation goes on from one answer; use --prompt for several")
    return params


if __name__ == "__main__":
    raise SystemExit(main())
