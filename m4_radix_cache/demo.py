"""A request starts from what others computed: `python -m m4_radix_cache.demo`.

Without flags: many users of one system prompt, then a conversation, each with what was reused, the tree of the cache,
and the time to the first token with and without it; then a memory that is too small, where cached text is evicted and
a request is retracted; and what there is to see in all that, with its numbers. `--prompt`, `--chat` and most other
flags are those of m1 to m3. m3's `--preemption` is gone: who loses its place always computes again what is lost.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.config import check_whole_number
from m1_single_request.errors import ConfigError
from m3_paged_attention import demo as m3
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.config import AttentionBackend, LoadFormat
from m4_radix_cache.config import (
    CacheConfig,
    PrefixCacheName,
    SchedulePolicyName,
    SchedulerConfig,
)
from m4_radix_cache.demo_parts.little_memory import CONSERVATIVENESS, LITTLE
from m4_radix_cache.demo_parts.stage import Settings
from m4_radix_cache.demo_parts.tour import tour
from m4_radix_cache.demo_parts.user import User
from m4_radix_cache.input_processor import check_cache_salt, check_priority
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.mem_cache.eviction import STRATEGIES

NUM_USERS = 5
PLENTY = 8192  # tokens, in parts 1 and 2 of the tour: enough, and numbers that a reader can add up


def make_parser(prog: str = "python -m m4_radix_cache.demo") -> argparse.ArgumentParser:
    """The flags of m1 to m3, and those of a cache."""
    parser = m1.make_parser(prog)
    parser.add_argument(
        "--n",
        type=int,
        help="so many answers to one prompt, which share it through the cache; in the tour: to the last user's",
    )
    parser.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default="auto",
        help="dummy: random weights of the model's shape instead of its own",
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
    add_cache_flags(parser)
    add_batching_flags(parser)
    add_memory_flags(parser)
    return parser


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a prefix cache and of those who share it."""
    sharing = parser.add_argument_group("prefix cache")
    sharing.add_argument(
        "--cache",
        choices=get_args(PrefixCacheName),
        default="radix",
        help="how requests find what others computed: in a tree of tokens (the default), in a table of hashed pages, "
        "or not at all (chunk)",
    )
    sharing.add_argument(
        "--eviction-policy",
        choices=tuple(STRATEGIES),
        default="lru",
        help="what goes first when room is needed; default: lru; the others are for --cache radix",
    )
    sharing.add_argument("--cache-salt", metavar="TENANT", help="share KV only with requests of the same salt")
    sharing.add_argument(
        "--priority",
        type=int,
        default=0,
        help="of all requests; it matters to --schedule-policy priority and --eviction-policy priority",
    )


def add_batching_flags(parser: argparse.ArgumentParser) -> None:
    """m2's flags of a batch, and who goes first."""
    batching = parser.add_argument_group("batching")
    batching.add_argument(
        "--schedule-policy",
        choices=get_args(SchedulePolicyName),
        default="lpm",
        help="who of those that wait goes first; default: lpm, the longest prefix match in the cache",
    )
    batching.add_argument(
        "--schedule-conservativeness",
        type=float,
        metavar="X",
        help="how much memory is kept for answers to come: less admits more, and retracts more often; default: 1, and "
        f"{CONSERVATIVENESS} in part 3 of the tour",
    )
    batching.add_argument(
        "--max-num-seqs", type=int, default=16, help="so many requests run at a time at most; default: 16"
    )
    batching.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="so many new tokens go through the model in one step; default: as the longest prompt needs",
    )
    batching.add_argument(
        "--num-prompts", type=int, default=NUM_USERS, help=f"users in part 1 of the tour; default: {NUM_USERS}"
    )


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """m3's flags of the KV memory, under SGLang's names, too."""
    memory = parser.add_argument_group(
        "KV memory",
        f"Give at most one of the four sizes. In the tour it is that of part 3, {LITTLE} tokens by default; otherwise "
        "the engine decides without one. --preemption of m3 is gone: a request that loses its place leaves what it has "
        "computed to the cache as far as others share it, and computes the rest again.",
    )
    memory.add_argument(
        "--page-size", "--block-size", type=int, default=16, metavar="TOKENS", help="tokens per page; default: 16"
    )
    memory.add_argument("--max-total-tokens", type=int, metavar="TOKENS", help="room for exactly so many tokens")
    memory.add_argument("--num-blocks", type=int, metavar="PAGES", help="the same in pages")
    memory.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="as many pages as this has room for")
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="on CUDA: this share of the device for weights, activations and KV",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Do what the flags say."""
    m3.check_flags(args)
    options = request_options(args)
    params = replace(m1.sampling_params(args), n=1 if args.n is None else args.n)
    trace = m1.trace_config(args, m1.console_reader(args, console))
    model, scheduler, memory = m3.model_config(args), scheduler_config(args), cache_config(args)
    if args.threads or args.model is None:
        torch.set_num_threads(args.threads or 1)
    if m1.is_tour(args):
        settings = Settings(
            model=model,
            scheduler=scheduler,
            cache=plenty(memory),
            little_scheduler=scheduler_config(args, conservativeness=CONSERVATIVENESS),
            little_cache=little(memory),
            trace=trace,
            params=replace(params, n=1),
            num_users=args.num_prompts,
            num_answers=params.n,
            options=options,
        )
        tour(settings, console)
        return
    with LLMEngine(model_config=model, scheduler_config=scheduler, cache_config=memory, trace_config=trace) as engine:
        user = cast(LLMEngine, User(engine, options, console))  # all that m1 calls of an engine
        m1.converse(user, args, params, console)


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """What every request comes with, checked."""
    check_priority(args.priority)
    check_cache_salt(args.cache_salt)
    return {"priority": args.priority, "cache_salt": args.cache_salt}


def scheduler_config(args: argparse.Namespace, conservativeness: float = 1.0) -> SchedulerConfig:
    """The flags of a batch, checked."""
    given = args.schedule_conservativeness
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        schedule_policy=args.schedule_policy,
        schedule_conservativeness=conservativeness if given is None else given,
    )


def cache_config(args: argparse.Namespace) -> CacheConfig:
    """The flags of the cache and its memory, checked."""
    config = CacheConfig(page_size=args.page_size, prefix_cache=args.cache, eviction_policy=args.eviction_policy)
    check_whole_number("num_blocks", args.num_blocks, low=1, optional=True)
    tokens = args.max_total_tokens
    if args.num_blocks is not None:
        if tokens is not None:
            raise ConfigError("num_blocks and max_total_tokens are two names of the same size: give one of them")
        tokens = args.num_blocks * args.page_size
    return replace(
        config,
        max_total_tokens=tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def plenty(config: CacheConfig) -> CacheConfig:
    """The memory of the first parts of the tour. Its engine audits every step."""
    size = blocks_for(PLENTY, config.page_size) * config.page_size
    return replace(config, max_total_tokens=size, kv_cache_memory_bytes=None, gpu_memory_utilization=None, debug=True)


def little(config: CacheConfig) -> CacheConfig:
    """The memory of the last part: what the flags say, or little. Its engine audits every step, too."""
    sizes = (config.max_total_tokens, config.kv_cache_memory_bytes, config.gpu_memory_utilization)
    if all(size is None for size in sizes):
        config = replace(config, max_total_tokens=blocks_for(LITTLE, config.page_size) * config.page_size)
    return replace(config, debug=True)


if __name__ == "__main__":
    raise SystemExit(main())
