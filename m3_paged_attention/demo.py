"""Demo of m3, many requests in little memory: `python -m m3_paged_attention.demo`.

Without --prompt and --chat: m2's burst of questions in 36 blocks of 8 tokens, less than a tenth of one of m2's slots,
with a map of the blocks at every step, and 3 answers to one question; then m2 and m3 measured on the same requests.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m1_single_request.flags import config_of, given
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching import demo as m2
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.config import CacheConfig, ModelConfig, SchedulerConfig
from m3_paged_attention.demo_tour import BLOCK_SIZE, NUM_ANSWERS, POOL_TOKENS, tour
from m3_paged_attention.llm_engine import LLMEngine

MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m2.DemoConfig):
    """Settings of the tour, and the number of threads."""

    threads: int | None = None
    """Number of CPU threads. Default: 1 for the model that ships, whose operations are too small to share; else that of
    torch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads={self.threads} must be from 1 to {MAX_THREADS}")

    def set_threads(self, model: ModelConfig) -> None:
        """Set the number of CPU threads for this model."""
        if self.threads or model.model is None:
            torch.set_num_threads(self.threads or 1)


FLAGS: m1.Flags = {
    "model": (ModelConfig, f"{m1.FLAGS['model'][1]} load_format attention_backend"),
    "sampling": (SamplingParams, f"{m1.FLAGS['sampling'][1]} n"),
    "batching": (SchedulerConfig, "max_num_seqs max_num_batched_tokens preemption_mode"),
    "KV memory": (CacheConfig, "block_size num_blocks kv_cache_memory_bytes gpu_memory_utilization"),
    "tour": (DemoConfig, "num_prompts threads"),
}
SPELLED = {"preemption_mode": ["--preemption"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m3_paged_attention.demo", __doc__, FLAGS, SPELLED).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    demo = config_of(args, DemoConfig)
    configs: dict[str, Any] = {
        "model_config": config_of(args, ModelConfig),
        "scheduler_config": config_of(args, SchedulerConfig),
        "cache_config": config_of(args, CacheConfig),
        "trace_config": m1.trace_config(args, console),
    }
    demo.set_threads(configs["model_config"])
    if m1.is_tour(args):
        params = config_of(args, SamplingParams, n=NUM_ANSWERS)
        configs["cache_config"] = replace(configs["cache_config"], **little_memory(args))
        tour(configs, params, console, num_prompts=demo.num_prompts)
        return
    with LLMEngine(**configs) as engine:
        m1.Conversation(engine, answer_params(args), console).run(args)


def answer_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the flags. Raises `ConfigError` for a chat with several answers."""
    params = config_of(args, SamplingParams)
    if args.chat and params.n > 1:
        raise ConfigError(f"n={params.n}: a conversation goes on from one answer; use --prompt for several")
    return params


def little_memory(args: argparse.Namespace) -> dict[str, int]:
    """Return the tour's block size, and its number of blocks unless the flags have a size of the memory."""
    sizes = given(args, CacheConfig)
    block_size = sizes.pop("block_size", BLOCK_SIZE)
    number = {} if sizes else {"num_blocks": blocks_for(POOL_TOKENS, block_size)}
    return {"block_size": block_size, **number}


if __name__ == "__main__":
    raise SystemExit(main())
