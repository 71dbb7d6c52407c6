"""Demo of m5, many tokens in a step: `python -m m5_chunked_prefill_spec.demo`.

Without --prompt and --chat: a long prompt arrives among streams, with the gaps between their tokens when it runs whole
and when it runs in pieces; then two ways to draft tokens, on three kinds of text, with every token in the colour of its
origin, the steps that are saved, and the speed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.field_rules import PositiveInt
from m1_single_request.flags import config_of
from m3_paged_attention import demo as m3
from m4_radix_cache import demo as m4
from m5_chunked_prefill_spec import LLMEngine, ModelConfig, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL
from m5_chunked_prefill_spec.demo_tour import TOUR_BUDGET, Tour


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m4.DemoConfig):
    """Settings of the demo itself."""

    num_prompts: PositiveInt = 4
    """Number of streams in part 1 of the tour."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Speculative decoding; `SpeculativeConfig` has the same settings under other names."""

    speculative: Literal["ngram", "draft_model", "none"] | None = None
    """Source of the drafts. Default: none; in a tour ngram, or ngram and draft_model in turn."""
    num_speculative_tokens: int | None = None
    """Number of drafts for a request in one step."""
    draft_model: str | None = None
    """A local directory or hub id of a model with the target's tokenizer. Default: the draft checkpoint that ships."""


STEP = "schedule enable_chunked_prefill chunked_prefill_size target_gap_ms"
FLAGS: m1.Flags = {
    **m4.FLAGS,
    "batching": (SchedulerConfig, f"{m4.FLAGS['batching'][1]} {STEP}"),
    "speculative decoding": (DraftConfig, "speculative num_speculative_tokens draft_model"),
    "tour": (DemoConfig, m4.FLAGS["tour"][1]),
}
SPELLED = m4.SPELLED | {"enable_chunked_prefill": ["--chunked-prefill"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m5_chunked_prefill_spec.demo", __doc__, FLAGS, SPELLED).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    params, demo, drafts = m3.answer_params(args), config_of(args, DemoConfig), speculative_configs(args)
    options = m4.request_options(args)
    configs: dict[str, Any] = {
        "model_config": config_of(args, ModelConfig),
        "scheduler_config": scheduler_config(args),
        "cache_config": m4.cache_config(args),
        "trace_config": m1.trace_config(args, console),
    }
    demo.set_threads(configs["model_config"])
    if m1.is_tour(args):
        Tour(configs, params, options, console).run(drafts, demo.num_prompts)
        return
    with LLMEngine(**configs, speculative_config=next(iter(drafts.values()), SpeculativeConfig())) as engine:
        m4.Conversation(engine, params, console, options).run(args)


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    """Return the configuration of a step; the steps of the tour are small."""
    config = config_of(args, SchedulerConfig)
    if m1.is_tour(args) and config.max_num_batched_tokens is None and config.enable_chunked_prefill:
        return replace(config, max_num_batched_tokens=max(TOUR_BUDGET, config.max_num_seqs))
    return config


def speculative_configs(args: argparse.Namespace) -> dict[str, SpeculativeConfig]:
    """Return the requested source of drafts by name; for a tour without a request, all for which there is a model."""
    flags = config_of(args, DraftConfig)
    given: dict[str, Any] = {"num_speculative_tokens": flags.num_speculative_tokens, "model": flags.draft_model}
    given = {name: value for name, value in given.items() if value is not None}
    if flags.speculative is None and m1.is_tour(args):
        has_draft = "model" in given or (config_of(args, ModelConfig).model is None and DEFAULT_DRAFT_MODEL.exists())
        drafts = {"draft_model": SpeculativeConfig(method="draft_model", **given)} if has_draft else {}
        given.pop("model", None)
        return {"ngram": SpeculativeConfig(method="ngram", **given), **drafts}
    method = None if flags.speculative == "none" else flags.speculative
    config = SpeculativeConfig(method=method, **given)
    return {} if method is None else {method: config}


if __name__ == "__main__":
    raise SystemExit(main())
