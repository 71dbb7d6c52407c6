"""Many requests in little memory: `python -m m3_paged_attention.demo`.

Without flags: m2's burst of questions in a KV memory that is less than a tenth of one of m2's slots, with a map of its
blocks that shows the requests in them at every step; facts of this run, with its numbers; then m2 and m3 measured on
the same requests. `--prompt`, `--chat` and most other flags are m1's and m2's; m2's `--execution` is gone, because a
batch without padding leaves nothing to choose.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m2_continuous_batching import demo as m2
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.config import (
    AttentionBackend,
    CacheConfig,
    LoadFormat,
    ModelConfig,
    PreemptionMode,
    SchedulerConfig,
)
from m3_paged_attention.demo_parts.tour import BLOCK_SIZE, NUM_ANSWERS, POOL_TOKENS, tour
from m3_paged_attention.llm_engine import LLMEngine

MAX_THREADS = 1024


def make_parser(prog: str = "python -m m3_paged_attention.demo") -> argparse.ArgumentParser:
    """Return the parser of m1's and m2's flags, and of the flags of a KV memory in blocks."""
    parser = m1.make_parser(prog)
    parser.add_argument(
        "--n",
        type=int,
        help=f"so many answers to one prompt; default: 1, and {NUM_ANSWERS} for one question of the tour",
    )
    parser.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default="auto",
        help="dummy: random weights of the model's shape instead of its own; m2 cannot do that, so nothing is compared",
    )
    parser.add_argument(
        "--attention-backend",
        choices=get_args(AttentionBackend),
        default="auto",
        help="which kernels compute; default: triton on CUDA, native on a CPU with a C++ compiler, else torch",
    )
    parser.add_argument(
        "--threads",
        type=int,
        help="CPU threads; default: 1 for the model that ships, whose operations are too small to share, else torch's",
    )
    m2.add_batching_flags(parser, max_num_seqs=16)
    add_memory_flags(parser)
    return parser


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a KV memory in blocks; later milestones have them, too."""
    memory = parser.add_argument_group(
        "KV memory",
        "Give at most one of the three sizes. Without one the tour has little memory; else the engine decides.",
    )
    memory.add_argument("--block-size", type=int, help=f"tokens per block; default: {BLOCK_SIZE} in the tour, else 16")
    memory.add_argument(
        "--num-blocks", type=int, help=f"exactly so many blocks; default: enough for {POOL_TOKENS} tokens in the tour"
    )
    memory.add_argument(
        "--kv-cache-memory-bytes", type=int, metavar="BYTES", help="as many blocks as this has room for"
    )
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="on CUDA: this share of the device for weights, activations and KV",
    )
    memory.add_argument(
        "--preemption",
        choices=get_args(PreemptionMode),
        default="recompute",
        help="when blocks run out, somebody loses its own: they are computed again later (the default), or kept in "
        "host memory",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the mode that the flags select."""
    check_flags(args)
    params = replace(m1.sampling_params(args), n=1 if args.n is None else args.n)
    trace = m1.trace_config(args, m1.console_reader(args, console))
    model, scheduler, memory = model_config(args), scheduler_config(args), cache_config(args)
    if args.threads or args.model is None:
        torch.set_num_threads(args.threads or 1)
    if m1.is_tour(args):
        params = replace(params, n=1)
        several = NUM_ANSWERS if args.n is None else args.n
        tour(model, scheduler, memory, trace, params, console, num_answers=several, num_prompts=args.num_prompts)
        return
    with LLMEngine(model_config=model, scheduler_config=scheduler, cache_config=memory, trace_config=trace) as engine:
        m1.converse(engine, args, params, console)


def check_flags(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for invalid flags that no configuration class checks."""
    m2.check_num_prompts(args)
    if args.threads is not None and not 1 <= args.threads <= MAX_THREADS:
        raise ConfigError(f"threads={args.threads} must be from 1 to {MAX_THREADS}")
    if args.chat and args.n not in (None, 1):
        raise ConfigError(f"n={args.n}: a conversation goes on from one answer; use --prompt for several")


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Return the model configuration of the flags, checked."""
    return ModelConfig(
        **vars(m1.model_config(args)), load_format=args.load_format, attention_backend=args.attention_backend
    )


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """Return the scheduler configuration of the flags, checked."""
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        preemption_mode=args.preemption,
    )


def cache_config(args: argparse.Namespace) -> CacheConfig:
    """Return the cache configuration of the flags, checked. The tour has few blocks, of its own size."""
    given = {
        name: getattr(args, name)
        for name in ("block_size", "num_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization")
        if getattr(args, name) is not None
    }
    config = CacheConfig(**given)
    if not m1.is_tour(args):
        return config
    block_size = given.get("block_size", BLOCK_SIZE)
    if given.keys() <= {"block_size"}:
        return replace(config, block_size=block_size, num_blocks=blocks_for(POOL_TOKENS, block_size))
    return replace(config, block_size=block_size)


if __name__ == "__main__":
    raise SystemExit(main())
