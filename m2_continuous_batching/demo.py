"""Demo of m2, many requests at a time: `python -m m2_continuous_batching.demo`.

Without --prompt and --chat: three questions and a burst of later ones, with a timeline of the batch at every step of
at most 97 new tokens; then static and continuous batching, measured on the same requests.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.config import ModelConfig
from m1_single_request.errors import ConfigError
from m1_single_request.field_rules import PositiveInt, check_fields
from m1_single_request.flags import config_of
from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.demo_tour import tour
from m2_continuous_batching.llm_engine import LLMEngine

TOUR_BUDGET = 97  # tokens in a step: one more than the longest prompt of the tour


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m1.DemoConfig):
    """Settings of the demo itself."""

    num_prompts: PositiveInt = 24
    """Number of requests in the comparison."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ConfigError)


@dataclass(frozen=True, kw_only=True)
class Limits(SchedulerConfig):
    """The limits of a batch: of fewer requests, so that some of the tour must wait."""

    max_num_seqs: PositiveInt = 4


FLAGS: m1.Flags = {
    **m1.FLAGS,
    "batching": (Limits, "max_num_seqs max_num_batched_tokens execution"),
    "demo": (DemoConfig, "num_prompts threads"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m2_continuous_batching.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    params, demo, limits = config_of(args, SamplingParams), config_of(args, DemoConfig), config_of(args, Limits)
    if m1.is_tour(args) and limits.max_num_batched_tokens is None:
        limits = replace(limits, max_num_batched_tokens=max(TOUR_BUDGET, limits.max_num_seqs))
    with LLMEngine(**m1.configs_of(args, console, model=ModelConfig), scheduler_config=limits) as engine:
        if m1.is_tour(args):
            tour(engine, params, console, num_prompts=demo.num_prompts)
        else:
            m1.Conversation(engine, params, console).run(args)


if __name__ == "__main__":
    raise SystemExit(main())
