"""Configuration of an m3 engine: m2's limits, a KV memory in blocks, and the attention backend.

The model's configuration has two more fields than m1's, because from here on the engine has its own forward pass: the
source of the weights, and the backend. `execution` of m2 is removed: a flat batch has only one way to run. vLLM:
`ModelConfig`, `CacheConfig`, `SchedulerConfig`; SGLang: `ServerArgs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from m1_single_request.config import (
    EngineConfig as SingleRequestConfig,
    ModelConfig as SingleRequestModelConfig,
    check_whole_number,
)
from m1_single_request.errors import ConfigError, shown
from m2_continuous_batching.config import BatchLimits

LoadFormat = Literal["auto", "dummy"]
AttentionBackend = Literal["auto", "native", "torch", "triton"]
PreemptionMode = Literal["recompute", "swap"]
CPU_KV_BYTES, MAX_CPU_KV_BYTES = 512 * 2**20, 4 * 2**30
GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SingleRequestModelConfig):
    """m1's settings of the model, and the kernels that compute it."""

    max_model_len: int | None = None
    """Maximum number of tokens of prompt plus output. None: the model's own limit, or as many as fit the KV memory."""
    seed: int = 0
    """Seed of the engine. A request without a seed derives one from this and its number; `dummy` weights use it too."""
    load_format: LoadFormat = "auto"
    """`auto`: the directory's safetensors. `dummy`: random weights of the shapes in its config.json, for benchmarks."""
    attention_backend: AttentionBackend = "auto"
    """The kernels: `triton` on GPUs, `native` (C++, compiled at its first use) on CPUs, `torch` anywhere. `auto`: the
    first of these that can run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("load_format", self.load_format, LoadFormat)
        check_choice("attention_backend", self.attention_backend, AttentionBackend)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The size limits of a batch, and the preemption mode."""

    preemption_mode: PreemptionMode = "recompute"
    """Treatment of a preempted request's KV. `recompute`: freed, and computed again later. `swap`: copied to host
    memory and back (`CacheConfig.swap_space_bytes`)."""

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The size of the KV memory and of its blocks.

    At most one of `kv_cache_memory_bytes`, `gpu_memory_utilization` and `num_blocks` may be given.
    """

    block_size: int = 16
    """Tokens per block."""
    kv_cache_memory_bytes: int | None = None
    """A budget in bytes. The default on a CPU: 512 MiB, or more if `max_num_seqs` requests of the model's length need
    it, up to 4 GiB or a quarter of the machine's memory, whichever is smaller; with `swap`, half of the part above
    512 MiB. Memory is used only for blocks with tokens."""
    gpu_memory_utilization: float | None = None
    """On CUDA: the fraction of the device's memory for weights, activations and KV together. A profiling run measures
    the first two; the rest is KV memory. Default on CUDA: 0.9."""
    num_blocks: int | None = None
    """Exact number of blocks, even if the longest request does not fit (then that request fails)."""
    swap_space_bytes: int | None = None
    """Host memory for swapped-out requests, in bytes; only with `preemption_mode="swap"`. None: as many blocks as on
    the device."""

    def __post_init__(self) -> None:
        check_whole_number("block_size", self.block_size, low=1)
        check_whole_number("kv_cache_memory_bytes", self.kv_cache_memory_bytes, low=1, optional=True)
        check_whole_number("num_blocks", self.num_blocks, low=1, optional=True)
        check_whole_number("swap_space_bytes", self.swap_space_bytes, low=1, optional=True)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        check_one_given(self, "kv_cache_memory_bytes", "gpu_memory_utilization", "num_blocks")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """The whole configuration of an m3 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise `ConfigError` unless `value` is one of the strings of a `Literal`, or a key of a mapping."""
    valid = tuple(choices) if isinstance(choices, Mapping) else get_args(choices)
    if not isinstance(value, str) or value not in valid:
        raise ConfigError(f"{name}={shown(value)} is unknown: use {' or '.join(valid)}")


def check_share(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is None, or a number greater than 0 and at most 1."""
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1):
        raise ConfigError(f"{name}={shown(value)} must be a number greater than 0 and at most 1")


def check_one_given(config: Any, *names: str) -> None:
    """Raise `ConfigError` if more than one of these settings is given; each of them sets the size of the KV memory."""
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both set the size of the KV memory: give one of them")
