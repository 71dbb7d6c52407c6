"""Demo of m5, many tokens in a step: `python -m m5_chunked_prefill_spec.demo`.

Without --prompt and --chat: a long prompt arrives among streams, with the gaps between their tokens when it runs whole
and when it runs in pieces; then two ways to draft tokens, on three kinds of text, with every token in the colour of its
origin, the steps that are saved, and the speed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.field_rules import PositiveInt
from m1_single_request.flags import config_of, given
from m3_paged_attention import demo as m3
from m4_radix_cache import demo as m4
from m5_chunked_prefill_spec import LLMEngine, ModelConfig, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.demo_tour import TOUR_BUDGET, Tour


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m4.DemoConfig):
    """Settings of the demo itself."""

    num_prompts: PositiveInt = 4
    """Number of streams in part 1 of the tour."""


STEP = "schedule enable_chunked_prefill=--chunked-prefill chunked_prefill_size target_gap_ms"
CLASSES = {**m4.CLASSES, "scheduler": SchedulerConfig}
"""Configuration classes of an engine that have flags, besides that of drafts, by their fields in `EngineConfig`."""
FLAGS: m1.Flags = {
    **m4.FLAGS,
    "batching": (SchedulerConfig, f"{m4.FLAGS['batching'][1]} {STEP}"),
    "drafts": (SpeculativeConfig, "method=--speculative num_speculative_tokens model=--draft-model"),
    "demo": (DemoConfig, m4.FLAGS["demo"][1]),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m5_chunked_prefill_spec.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    demo, params, drafts = config_of(args, DemoConfig), m3.answer_params(args), speculative_configs(args)
    configs = m1.configs_of(args, console, **CLASSES)
    options, limits = m4.request_options(args), configs["scheduler_config"]
    if m1.is_tour(args):
        if limits.max_num_batched_tokens is None and limits.enable_chunked_prefill:
            limits = replace(limits, max_num_batched_tokens=max(TOUR_BUDGET, limits.max_num_seqs or 0))
        Tour({**configs, "scheduler_config": limits}, params, options, console).run(drafts, demo.num_prompts)
        return
    with LLMEngine(**configs, speculative_config=drafts[0]) as engine:
        m4.Conversation(engine, params, console, options).run(args)


def speculative_configs(args: argparse.Namespace) -> list[SpeculativeConfig]:
    """Return the source of drafts of the flags; for a tour without them, all for which there is a model."""
    if not m1.is_tour(args) or given(args, SpeculativeConfig).keys() & {"method", "model"}:
        return [config_of(args, SpeculativeConfig)]
    methods = ("ngram", "draft_model") if config_of(args, ModelConfig).model is None else ("ngram",)
    return [config_of(args, SpeculativeConfig, method=method) for method in methods]


if __name__ == "__main__":
    raise SystemExit(main())
