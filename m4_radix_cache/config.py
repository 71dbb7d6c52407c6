"""Configuration of an m4 engine: order of waiting requests, prefix cache, eviction, page size and KV memory.

The model's configuration is m3's. Blocks are called pages here, as in SGLang, and memory is counted in tokens. m3's
`preemption_mode` is gone: a retracted request keeps its cached pages until they are evicted, and computes the rest of
its tokens again. SGLang: `ServerArgs`; vLLM: `CacheConfig`, `SchedulerConfig`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from m1_single_request.config import (
    EngineConfig as SingleRequestConfig,
    TraceConfig as SingleRequestTraceConfig,
    check_path,
)
from m1_single_request.errors import ConfigError, shown
from m1_single_request.field_rules import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields
from m3_paged_attention.config import BatchLimits, KVCacheDtype, ModelConfig, Share, TraceConfig, check_one_given
from m4_radix_cache.mem_cache.eviction import STRATEGIES

SchedulePolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
PrefixCacheName = Literal["radix", "hash", "chunk"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """Limits of a batch, and the order in which requests join it."""

    schedule_policy: SchedulePolicyName = "lpm"
    """Order of the waiting requests. `fcfs`: first come, first served. `lpm`: longest cached prefix first.
    `dfs-weight`: branch by branch of the tree, the branch with most requests first. Both also hold a request back while
    another one computes its prefix. `lof`: longest output first. `random`. `priority`: highest `priority=` of a request
    first."""
    schedule_conservativeness: NonNegativeFloat = 1.0
    """Factor of the memory reserved for future output tokens of running requests. With 1, 70 % of these tokens are
    reserved at first, and fewer with every decode step. A lower value admits more requests and retracts more often."""
    priority_preemption: bool = False
    """Whether a waiting request takes the place of running ones of lower priority if it has no room otherwise. Only
    with `schedule_policy="priority"`. A preempted request keeps its tokens, and resumes from the cache."""
    preemption_threshold: NonNegativeInt = 10
    """With `priority_preemption`: a request preempts those whose priority is lower by more than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.priority_preemption and self.schedule_policy != "priority":
            raise ConfigError(
                f"priority_preemption=True has no effect with schedule_policy={self.schedule_policy!r}: use 'priority'"
            )
        if not self.priority_preemption and self.preemption_threshold != SchedulerConfig.preemption_threshold:
            raise ConfigError(
                f"preemption_threshold={self.preemption_threshold} has no effect without priority_preemption: "
                f"give both, or neither"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV memory: its size, its page size, the format of its numbers and the prefix cache that shares it. At most one of
    the sizes may be given."""

    page_size: PositiveInt = 16
    """Tokens per page (m3: block). Only whole pages are shared."""
    prefix_cache: PrefixCacheName = "radix"
    """Cache in which requests find computed KV. `radix`: a tree of tokens (SGLang), or your own part `prefix_cache`.
    `hash`: a table of hashed pages (vLLM). `chunk`: no KV is shared."""
    eviction_policy: str = "lru"
    """Nodes that are evicted first: the least recently used (`lru`), the least frequently used (`lfu`), the oldest
    (`fifo`), those from which fewer than two requests started (`slru`), those of the lowest `priority=` (`priority`);
    or any other of the `STRATEGIES`."""
    max_total_tokens: PositiveInt | None = None
    """Size in tokens, rounded down to whole pages. It may be less than the longest request, which then fails alone."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size in bytes. The default on a CPU: 512 MiB, or more if `max_num_seqs` requests of the model's length need
    it, up to 4 GiB or a quarter of the machine's memory; the engines of a group share the part above 512 MiB. The
    system assigns memory only to pages that are written."""
    gpu_memory_utilization: Share | None = None
    """On CUDA: share of the device's memory for weights, activations and KV together. The KV memory is this share less
    the memory of weights and of a profiling run. The default there: 0.9; the engines of a group that are on one device
    divide it. SGLang's `mem_fraction_static`."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of the numbers in the KV memory. `auto`: the model's precision. `bfloat16`: half the bytes of float32.
    `int8` and `fp8` (e4m3): one byte per number, and a float32 scale per token and head. More tokens fit, and outputs
    change a little."""
    host_memory_bytes: NonNegativeInt | None = None
    """Size of a second tier of the radix cache, in host memory: what is evicted from the KV memory stays there, and is
    copied back when it is needed. None or 0: there is none."""
    write_policy: WritePolicy | None = None
    """When KV is copied to that tier. `write_through`, the default: when it enters the cache.
    `write_through_selective`: when a second request needs it. `write_back`: when it is evicted."""
    disk_path: str | Path | None = None
    """Directory of a third tier, which outlives the process: what is in host memory is written there, and requests of
    later engines find it. Several engines may use it, of any models. It is created for its owner alone."""
    disk_bytes: PositiveInt | None = None
    """Capacity of that directory. Default: 10 GiB."""
    prefetch_policy: PrefetchPolicy | None = None
    """How long a request waits for its pages on the disk, 256 tokens or more. `timeout`, the default: 1 s, and 0.25 s
    more per 1,024 tokens. `wait_complete`: until all are there. `best_effort`: not at all. What is not there is
    computed."""
    debug: bool = False
    """Check every slot that is freed, and audit the whole memory after every step. Slow."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_path("disk_path", self.disk_path, "a directory", optional=True)
        if not isinstance(self.eviction_policy, str) or self.eviction_policy not in STRATEGIES:
            known = " or ".join(STRATEGIES)
            raise ConfigError(f"eviction_policy={shown(self.eviction_policy)} is unknown: use {known}")
        check_one_given(self, "kv_cache_memory_bytes", "gpu_memory_utilization", "max_total_tokens")
        if self.prefix_cache != "radix" and self.eviction_policy != "lru":
            does = "evicts by lru only" if self.prefix_cache == "hash" else "keeps nothing that could be evicted"
            raise ConfigError(
                f"eviction_policy={self.eviction_policy!r} has no effect with prefix_cache={self.prefix_cache!r}, "
                f"which {does}: use prefix_cache='radix'"
            )
        for name, needed in (
            ("write_policy", "host_memory_bytes"),
            ("disk_path", "host_memory_bytes"),
            ("disk_bytes", "disk_path"),
            ("prefetch_policy", "disk_path"),
        ):
            if getattr(self, name) is not None and not getattr(self, needed):
                raise ConfigError(f"{name}={shown(getattr(self, name))} has no effect without {needed}")
        if self.host_memory_bytes and self.prefix_cache != "radix":
            raise ConfigError(
                f"host_memory_bytes={self.host_memory_bytes} has no effect with prefix_cache={self.prefix_cache!r}: "
                f"use prefix_cache='radix'"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"max_total_tokens={self.max_total_tokens} is less than one page of page_size={self.page_size} tokens"
            )

    @property
    def num_blocks(self) -> int | None:
        """`max_total_tokens` in pages (m3: blocks), or None."""
        return None if self.max_total_tokens is None else self.max_total_tokens // self.page_size


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """All settings of an m4 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    trace: TraceConfig | SingleRequestTraceConfig = field(default_factory=TraceConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
