"""Many tokens in one step: `python -m m5_chunked_prefill_spec.demo`.

Without flags: a long prompt comes while others stream, with the gaps between their tokens when it runs whole and when
it runs in pieces; then two ways to guess tokens on three kinds of text, every token in the colour of its origin, with
the steps that were saved and the speed that was measured. `--prompt`, `--chat` and most other flags are those of m1 to
m4.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from rich.console import Console

from m1_single_request import demo as m1
from m3_paged_attention import demo as m3
from m4_radix_cache import demo as m4
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.demo_parts.user import User
from m5_chunked_prefill_spec.config import (
    CHUNKED_BATCHED_TOKENS,
    DEFAULT_DRAFT_MODEL,
    ScheduleName,
    SchedulerConfig,
    SpeculativeConfig,
    SpeculativeMethod,
)
from m5_chunked_prefill_spec.demo_parts.stage import Settings
from m5_chunked_prefill_spec.demo_parts.tour import tour
from m5_chunked_prefill_spec.llm_engine import LLMEngine

TOUR_BUDGET = 64  # tokens of a step in part 1: small, so that there is something to see
NUM_STREAMS = 4
MEANINGS = {
    "n": "so many answers to one prompt, which share it through the cache; in the tour: to the long prompt of part 1",
    "num_prompts": f"answers that are being streamed in part 1 of the tour; default: {NUM_STREAMS}",
    "schedule_conservativeness": "how much memory is kept for answers to come: less admits more, and retracts more "
    "often; default: 1",
    "max_num_batched_tokens": "so many new tokens go through the model in one step; a longer prompt is cut; default: "
    f"{CHUNKED_BATCHED_TOKENS['cpu']} on a CPU, {CHUNKED_BATCHED_TOKENS['cuda']:,} on a GPU, and {TOUR_BUDGET} in part "
    "1 of the tour",
}
"""Of flags of earlier milestones, here."""
MEMORY = f"""Give at most one of the four sizes. Without one the tour has room for {m4.PLENTY:,} tokens; otherwise the
engine decides."""


def make_parser(prog: str = "python -m m5_chunked_prefill_spec.demo") -> argparse.ArgumentParser:
    """The flags of m1 to m4, those of a step, and those of guesses."""
    parser = m4.make_parser(prog)
    parser.set_defaults(num_prompts=NUM_STREAMS)
    steps = parser.add_argument_group("what a step is filled with")
    steps.add_argument(
        "--schedule",
        choices=get_args(ScheduleName),
        default="decode_first",
        help="decode_first: a token for everybody, prompts get the rest of the budget; prefill_first: prompts go alone",
    )
    steps.add_argument(
        "--no-chunked-prefill",
        action="store_true",
        help="take prompts whole; one that is longer than a step is refused",
    )
    steps.add_argument(
        "--chunked-prefill-size", type=int, metavar="TOKENS", help="at most so many tokens of prompts in one step"
    )
    steps.add_argument(
        "--target-gap-ms", type=float, metavar="MS", help="cut prompts so that a step takes no longer than this"
    )
    guesses = parser.add_argument_group("guesses")
    guesses.add_argument(
        "--speculative",
        choices=(*get_args(SpeculativeMethod), "none"),
        help="who guesses tokens; default: nobody, and in the tour both in turn",
    )
    guesses.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="at most so many guesses for a request in one step"
    )
    guesses.add_argument("--draft-model", help="a directory or hub id; default: the draft checkpoint that ships")
    retell(parser, MEANINGS, MEMORY)
    return parser


def retell(parser: argparse.ArgumentParser, meanings: Mapping[str, str], memory: str) -> None:
    """Say of earlier flags what they mean in this tour; argparse has no public way to."""
    for action in parser._actions:
        action.help = meanings.get(action.dest, action.help)
    for group in parser._action_groups:
        if group.title == "KV memory":
            group.description = memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Do what the flags say."""
    m3.check_flags(args)
    options = m4.request_options(args)
    params = replace(m1.sampling_params(args), n=1 if args.n is None else args.n)
    trace = m1.trace_config(args, m1.console_reader(args, console))
    model, scheduler, memory = m3.model_config(args), scheduler_config(args), m4.cache_config(args)
    speculators = speculative_configs(args)
    if args.threads or args.model is None:
        torch.set_num_threads(args.threads or 1)
    if m1.is_tour(args):
        settings = Settings(
            model=model,
            scheduler=small_steps(scheduler),
            cache=roomy(memory),
            speculators=speculators,
            trace=trace,
            params=replace(params, n=1),
            num_streams=args.num_prompts,
            num_answers=params.n,
            options=options,
        )
        tour(settings, console)
        return
    guesses: dict[str, Any] = (
        {"speculative_config": speculators[args.speculative]} if args.speculative in speculators else {}
    )
    with LLMEngine(
        model_config=model, scheduler_config=scheduler, cache_config=memory, trace_config=trace, **guesses
    ) as engine:
        user = cast(LLMEngine, User(cast(Any, engine), options, console))  # all that m1 calls of an engine
        m1.converse(user, args, params, console)


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """The flags of a step, checked."""
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        schedule=args.schedule,
        enable_chunked_prefill=not args.no_chunked_prefill,
        chunked_prefill_size=args.chunked_prefill_size,
        target_gap_ms=args.target_gap_ms,
        schedule_policy=args.schedule_policy,
        schedule_conservativeness=1.0 if args.schedule_conservativeness is None else args.schedule_conservativeness,
    )


def speculative_configs(args: argparse.Namespace) -> dict[str, SpeculativeConfig]:
    """Who guesses, checked: the one that was asked for, or both. A draft model for a foreign model must be named."""
    asked = args.speculative or ("both" if m1.is_tour(args) else "none")
    numbers = {} if args.num_speculative_tokens is None else {"num_speculative_tokens": args.num_speculative_tokens}
    if asked == "none":
        more = {"model": args.draft_model} if args.draft_model else {}
        return {"none": SpeculativeConfig(**numbers, **more)} if numbers or more else {}
    found = {}
    if asked in ("ngram", "both"):
        found["ngram"] = SpeculativeConfig(method="ngram", **numbers)
    has_draft = args.draft_model is not None or args.model is None
    if asked == "draft_model" or (asked == "both" and has_draft and (args.draft_model or DEFAULT_DRAFT_MODEL.exists())):
        found["draft_model"] = SpeculativeConfig(method="draft_model", model=args.draft_model, **numbers)
    return found


def small_steps(config: SchedulerConfig) -> SchedulerConfig:
    """The steps of the tour's first part: what the flags say, or small ones."""
    if config.max_num_batched_tokens is None and config.enable_chunked_prefill:
        return replace(config, max_num_batched_tokens=max(TOUR_BUDGET, config.max_num_seqs))
    return config


def roomy(config: CacheConfig) -> CacheConfig:
    """The memory of the tour: what the flags say, or plenty. Its engines with a trace audit every step."""
    sizes = (config.max_total_tokens, config.kv_cache_memory_bytes, config.gpu_memory_utilization)
    return m4.plenty(config) if all(size is None for size in sizes) else replace(config, debug=True)


if __name__ == "__main__":
    raise SystemExit(main())
