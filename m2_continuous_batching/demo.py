"""Demo of m2, many requests at a time: `python -m m2_continuous_batching.demo`.

Without flags it runs three questions and a burst of later ones, and draws a timeline of the batch at every step, with
its facts in sentences. Then it measures static batching, continuous batching and one request after the other on the
same requests. `--prompt`, `--chat` and most other flags are m1's.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.demo_tour import tour
from m2_continuous_batching.llm_engine import LLMEngine


def make_parser(prog: str = "python -m m2_continuous_batching.demo") -> argparse.ArgumentParser:
    """Return a parser of m1's flags and those of a batch."""
    parser = m1.make_parser(prog)
    add_batching_flags(parser, max_num_seqs=4).add_argument(
        "--execution",
        choices=("padded", "per_request"),
        default="padded",
        help="padded (the default): all rows of a step run together; per_request: one forward pass per request",
    )
    return parser


def add_batching_flags(parser: argparse.ArgumentParser, *, max_num_seqs: int) -> "argparse._ArgumentGroup":
    """Add a group with the flags of a batch that later milestones share."""
    batching = parser.add_argument_group("batching")
    batching.add_argument(
        "--max-num-seqs",
        type=int,
        default=max_num_seqs,
        help=f"maximum number of running requests; default: {max_num_seqs}",
    )
    batching.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="maximum number of new tokens in one step; default: enough for the longest prompt",
    )
    batching.add_argument("--num-prompts", type=int, default=24, help="requests in the comparison; default: 24")
    return batching


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    check_num_prompts(args)
    params = m1.sampling_params(args)
    trace = m1.trace_config(args, m1.console_reader(args, console))
    model, scheduler = m1.model_config(args), scheduler_config(args)
    if m1.is_tour(args):
        tour(model, scheduler, trace, params, console, num_prompts=args.num_prompts)
        return
    with LLMEngine(model_config=model, scheduler_config=scheduler, trace_config=trace) as engine:
        m1.converse(engine, args, params, console)


def check_num_prompts(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a comparison without requests."""
    if args.num_prompts < 1:
        raise ConfigError(f"num_prompts={args.num_prompts} must be at least 1")


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """Return the checked configuration that the flags of a batch describe."""
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        execution=args.execution,
    )


if __name__ == "__main__":
    raise SystemExit(main())
