"""What an m3 engine is told: m2's limits, a KV memory in blocks, and which kernels compute.

The model's configuration says two things more than m1's, because from here on the engine owns the forward pass: how
the weights come in, and which backend runs. `execution` of m2 is gone: a flat batch needs no choice. vLLM:
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
    """Prompt plus output never exceed this many tokens. None: what the model was made for, or as many as the KV memory
    has room for."""
    seed: int = 0
    """Requests without a seed of their own derive one from this and their number; `dummy` weights are drawn from it."""
    load_format: LoadFormat = "auto"
    """`auto`: the directory's safetensors. `dummy`: random weights of the shapes in its config.json, for benchmarks."""
    attention_backend: AttentionBackend = "auto"
    """What computes: `triton` on GPUs, `native` (C++, compiled at its first use) on CPUs, `torch` anywhere. `auto`: the
    first of these that can run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("load_format", self.load_format, LoadFormat)
        check_choice("attention_backend", self.attention_backend, AttentionBackend)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The largest batch, and the way to free KV memory when it runs out."""

    preemption_mode: PreemptionMode = "recompute"
    """What happens to a preempted request's KV. `recompute`: dropped, and computed again later. `swap`: moved to host
    memory and back (`CacheConfig.swap_space_bytes`)."""

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much KV memory there is, and in pieces of which size. At most one of the three sizes may be given."""

    block_size: int = 16
    """Tokens per block."""
    kv_cache_memory_bytes: int | None = None
    """A budget in bytes. The default on a CPU: 512 MiB, or more if `max_num_seqs` requests of the model's length need
    it, up to 4 GiB or a quarter of the machine's memory; with `swap`, half of what exceeds 512 MiB. Memory is taken
    only where tokens are written."""
    gpu_memory_utilization: float | None = None
    """On CUDA: the share of the device's memory that weights, activations and KV may take together; what a profiling
    run leaves of it is KV memory. The default there: 0.9."""
    num_blocks: int | None = None
    """Exactly so many blocks, whatever they take, even if the longest request does not fit (it then fails alone)."""
    swap_space_bytes: int | None = None
    """Host memory for requests that are swapped out; only with `preemption_mode="swap"`. None: as many blocks as the
    device has."""

    def __post_init__(self) -> None:
        check_whole_number("block_size", self.block_size, low=1)
        check_whole_number("kv_cache_memory_bytes", self.kv_cache_memory_bytes, low=1, optional=True)
        check_whole_number("num_blocks", self.num_blocks, low=1, optional=True)
        check_whole_number("swap_space_bytes", self.swap_space_bytes, low=1, optional=True)
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        check_one_given(self, "kv_cache_memory_bytes", "gpu_memory_utilization", "num_blocks")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """All settings of an m3 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise `ConfigError` unless `value` is one of the strings of a `Literal`, or of a mapping's keys."""
    known = tuple(choices) if isinstance(choices, Mapping) else get_args(choices)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{name}={shown(value)} is unknown: use {' or '.join(known)}")


def check_share(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is None, or a number greater than 0 and at most 1."""
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1):
        raise ConfigError(f"{name}={shown(value)} must be a number greater than 0 and at most 1")


def check_one_given(config: Any, *names: str) -> None:
    """Raise `ConfigError` if more than one of these settings, which all say the same thing, is given."""
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say how much KV memory there is: give one of them")
