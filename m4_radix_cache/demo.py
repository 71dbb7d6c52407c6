"""Demo of m4, KV that requests share: `python -m m4_radix_cache.demo`.

Without --prompt and --chat: many users of one system prompt, and a conversation, with the tokens that each request
reuses, the tree of the cache, and the time to the first token with and without it; then a memory that is too small,
where cached tokens are evicted and a request is retracted. The size of the KV memory in the flags is that of this last
part; the others have plenty. With --host-memory, such as 64MiB, the tour is another one: a conversation whose KV leaves
the device and comes back; with --disk also in a later process.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.field_rules import PositiveInt
from m1_single_request.flags import config_of
from m2_continuous_batching import demo as m2
from m3_paged_attention import demo as m3
from m4_radix_cache import CacheConfig, LLMEngine, RequestOutput, SamplingParams, SchedulerConfig
from m4_radix_cache.demo_tiers import TierTour
from m4_radix_cache.demo_tour import CONSERVATIVENESS, Tour, reuse


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m2.DemoConfig):
    """Settings of the demo itself."""

    num_prompts: PositiveInt = 5
    """Number of users in part 1 of the tour."""


@dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """Options of all requests."""

    priority: int = 0
    """Priority of all requests; it matters to --schedule-policy priority and --eviction-policy priority."""
    cache_salt: str | None = None
    """Name of a tenant: its requests share KV only with requests of the same tenant."""


TIERS = "host_memory_bytes=--host-memory write_policy disk_path=--disk disk_bytes prefetch_policy"
ORDER = "schedule_policy schedule_conservativeness priority_preemption preemption_threshold"

CLASSES = {**m3.CLASSES, "scheduler": SchedulerConfig, "cache": CacheConfig}
"""Configuration classes of an engine that have flags, by their fields in `EngineConfig`."""
FLAGS: m1.Flags = {
    **m3.FLAGS,
    "requests": (RequestConfig, "priority cache_salt"),
    "prefix cache": (CacheConfig, f"prefix_cache=--cache eviction_policy {TIERS}"),
    "batching": (SchedulerConfig, f"max_num_seqs max_num_batched_tokens {ORDER}"),
    "KV memory": (
        CacheConfig,
        "page_size max_total_tokens kv_cache_memory_bytes gpu_memory_utilization kv_cache_dtype",
    ),
    "demo": (DemoConfig, "num_prompts threads"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m4_radix_cache.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    demo, params, options = config_of(args, DemoConfig), m3.answer_params(args), request_options(args)
    configs = m1.configs_of(args, console, **CLASSES)
    if m1.is_tour(args):
        if configs["cache_config"].host_memory_bytes:
            TierTour(configs, params, options, console).run()
            return
        limits = config_of(args, SchedulerConfig, schedule_conservativeness=CONSERVATIVENESS)
        Tour({**configs, "scheduler_config": limits}, params, options, console).run(demo.num_prompts)
        return
    with LLMEngine(**configs) as engine:
        Conversation(engine, params, console, options).run(args)


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of every request."""
    config = config_of(args, RequestConfig)
    return {"priority": config.priority, "cache_salt": config.cache_salt}


class Conversation(m1.Conversation):
    """m1's conversation with another `stream`: requests have options, and the number of reused tokens is printed."""

    def __init__(self, engine: Any, params: SamplingParams, console: Console, options: dict[str, Any]) -> None:
        super().__init__(engine, params, console)
        self.options = options

    def stream(self, prompt: str | list[int]) -> Iterable[RequestOutput]:
        """Run one request; yield its output after each step, and print the tokens that it reused."""
        with self.engine.stream(prompt, self.params, **self.options) as outputs:
            for output in outputs:
                yield output
        self.console.print(f"\n[dim]{reuse(output)}[/dim]")


if __name__ == "__main__":
    raise SystemExit(main())
