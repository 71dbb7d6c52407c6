"""What an m4 engine is told: who goes first, how KV is shared, and in pages of which size.

The model's configuration is m3's. Blocks are called pages here, as in SGLang, and memory is counted in tokens. There is
no `preemption_mode` any more: whoever loses its place leaves what it computed to the cache's other users or drops it,
and computes the rest again. SGLang: `ServerArgs`; vLLM: `CacheConfig`, `SchedulerConfig`.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from m1_single_request.config import EngineConfig as SingleRequestConfig, check_whole_number
from m1_single_request.errors import ConfigError, shown
from m2_continuous_batching.config import BatchLimits
from m3_paged_attention.config import ModelConfig, check_choice, check_one_given, check_share
from m4_radix_cache.mem_cache.eviction import STRATEGIES

SchedulePolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
PrefixCacheName = Literal["radix", "hash", "chunk"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The largest batch, and the order in which requests join it."""

    schedule_policy: SchedulePolicyName = "lpm"
    """Who of those that wait goes first. `fcfs`: first come, first served. `lpm`: whoever finds most of its prompt in
    the cache. `dfs-weight`: branch after branch of the tree, the busiest first. `lof`: the longest output. `random`.
    `priority`: the highest `priority=` of a request."""
    schedule_conservativeness: float = 1.0
    """How much memory is kept for what running requests may still say: 1 expects 70 % of it at first and less as time
    goes by. Less admits more, and retracts more often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("schedule_policy", self.schedule_policy, SchedulePolicyName)
        check_number("schedule_conservativeness", self.schedule_conservativeness, at_least=0)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much KV memory there is, in pages of which size, and how it is shared. At most one of the sizes is given."""

    page_size: int = 16
    """Tokens per page: what m3 calls a block. Only whole pages are shared."""
    prefix_cache: PrefixCacheName = "radix"
    """How requests find what others computed. `radix`: a tree of tokens (SGLang), or the part `prefix_cache` if it is
    yours. `hash`: a table of hashed pages (vLLM). `chunk`: nothing is shared."""
    eviction_policy: str = "lru"
    """What goes first when room is needed: the least recently used, the least frequently used (`lfu`), the oldest
    (`fifo`), what fewer than two requests have started from (`slru`), the lowest `priority=`; or any other of the
    `STRATEGIES`."""
    max_total_tokens: int | None = None
    """Exactly so many tokens, less what does not fill a page, even if the longest request does not fit (it then fails
    alone)."""
    kv_cache_memory_bytes: int | None = None
    """A budget in bytes. The default on a CPU: 512 MiB, or more if `max_num_seqs` requests of the model's length need
    it, up to 4 GiB or a quarter of the machine's memory; the engines of a group share what exceeds 512 MiB. Memory is
    taken only where tokens are written."""
    gpu_memory_utilization: float | None = None
    """On CUDA: the share of the device's memory that weights, activations and KV may take together; what a profiling
    run leaves of it is KV memory. The default there: 0.9. SGLang's `mem_fraction_static`."""
    debug: bool = False
    """Check every slot that is given back, and audit the whole memory after every step. Slow."""

    def __post_init__(self) -> None:
        check_whole_number("page_size", self.page_size, low=1)
        check_choice("prefix_cache", self.prefix_cache, PrefixCacheName)
        check_choice("eviction_policy", self.eviction_policy, STRATEGIES)
        check_whole_number("kv_cache_memory_bytes", self.kv_cache_memory_bytes, low=1, optional=True)
        check_whole_number("max_total_tokens", self.max_total_tokens, low=1, optional=True)
        check_flag("debug", self.debug)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        check_one_given(self, "kv_cache_memory_bytes", "gpu_memory_utilization", "max_total_tokens")
        if self.prefix_cache != "radix" and self.eviction_policy != "lru":
            does = "evicts by lru only" if self.prefix_cache == "hash" else "keeps nothing that could be evicted"
            raise ConfigError(
                f"eviction_policy={self.eviction_policy!r} has no effect with prefix_cache={self.prefix_cache!r}, "
                f"which {does}: use prefix_cache='radix'"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"max_total_tokens={self.max_total_tokens} is less than one page of page_size={self.page_size} tokens"
            )

    @property
    def num_blocks(self) -> int | None:
        """`max_total_tokens` in pages, which m3 calls blocks."""
        return None if self.max_total_tokens is None else self.max_total_tokens // self.page_size


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """All settings of an m4 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)


def check_flag(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be True or False")


def check_number(name: str, value: Any, *, at_least: float) -> None:
    """Raise `ConfigError` unless `value` is a finite number of at least `at_least`."""
    if not (is_number(value) and value >= at_least):
        raise ConfigError(f"{name}={shown(value)} must be a number of at least {at_least}")


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
