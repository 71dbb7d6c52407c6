"""Demo of m2, many requests at a time: `python -m m2_continuous_batching.demo`.

Without --prompt and --chat: three questions and a burst of later ones, with a timeline of the batch at every step; then
one request after the other, static batching and continuous batching, measured on the same requests.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.config import ModelConfig, check_whole_number
from m1_single_request.flags import config_of
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.demo_tour import tour
from m2_continuous_batching.llm_engine import LLMEngine


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the tour."""

    num_prompts: int = 24
    """Number of requests in the comparison."""

    def __post_init__(self) -> None:
        check_whole_number("num_prompts", self.num_prompts, low=1)


FLAGS: m1.Flags = {
    **m1.FLAGS,
    "batching": (SchedulerConfig, "max_num_seqs max_num_batched_tokens execution"),
    "tour": (DemoConfig, "num_prompts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = m1.make_parser("m2_continuous_batching.demo", __doc__, FLAGS, max_num_seqs=4)
    return m1.exit_status(run, parser.parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    params, trace = config_of(args, SamplingParams), m1.trace_config(args, console)
    model, scheduler = config_of(args, ModelConfig), config_of(args, SchedulerConfig)
    num_prompts = config_of(args, DemoConfig).num_prompts
    if m1.is_tour(args):
        tour(model, scheduler, trace, params, console, num_prompts=num_prompts)
        return
    with LLMEngine(model_config=model, scheduler_config=scheduler, trace_config=trace) as engine:
        m1.Conversation(engine, params, console).run(args)


if __name__ == "__main__":
    raise SystemExit(main())
