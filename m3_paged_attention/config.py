"""Configuration of an m3 engine: limits of a batch, a KV memory in blocks, and the attention backend.

The model's configuration has three more fields than m1's, because from here on the engine has its own forward pass: the
source of the weights, their quantization, and the backend. `execution` of m2 is removed: a flat batch has only one way
to run. Its limits of a batch stay, but their defaults follow from the device. vLLM: `ModelConfig`, `CacheConfig`,
`SchedulerConfig`; SGLang: `ServerArgs`.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from m1_single_request.config import (
    EngineConfig as SingleRequestConfig,
    MaxModelLen,
    ModelConfig as SingleRequestModelConfig,
    TraceConfig as SingleRequestTraceConfig,
)
from m1_single_request.errors import ConfigError
from m1_single_request.field_rules import Int, PositiveInt, check_fields
from m3_paged_attention.device_limits import CPU_LIMITS, DeviceLimits

LoadFormat = Literal["auto", "dummy"]
AttentionBackend = Literal["auto", "native", "torch", "triton"]
PreemptionMode = Literal["recompute", "swap"]
KVCacheDtype = Literal["auto", "bfloat16", "int8", "fp8"]
Share = Annotated[float, Meta(gt=0, le=1)]
CPU_KV_BYTES, MAX_CPU_KV_BYTES = 512 * 2**20, 4 * 2**30
GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class ModelConfig(SingleRequestModelConfig):
    """m1's settings of the model, and the kernels that compute it."""

    max_model_len: MaxModelLen | None = None
    """Maximum number of tokens of prompt plus output. None: the model's own limit, or as many as fit the KV memory."""
    seed: Int = 0
    """Seed of the engine. A request without a seed derives one from this and its number; `dummy` weights use it too."""
    load_format: LoadFormat = "auto"
    """`auto`: the directory's safetensors. `dummy`: random weights of the shapes in its config.json, for benchmarks."""
    attention_backend: AttentionBackend = "auto"
    """The kernels: `triton` on GPUs, `native` (C++, compiled at its first use) on CPUs, `torch` anywhere. `auto`: the
    first of these that can run."""
    quantization: Literal["int8"] | None = None
    """`int8`: the weights of the linear layers are quantized to eight bits while they are read (`int8_weight.py`): a
    quarter or half of the memory, and one stream up to twice as fast; batches of sixteen requests or more gain no speed
    over bfloat16. For the backend `native`, in float32 and bfloat16, and for `torch`, which is slow. It applies to a
    draft model as well."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig(SingleRequestTraceConfig):
    """m1's settings of the trace, and what is recorded only if asked for."""

    experts: bool = False
    """Record in each step which experts its tokens use (`ExpertsUsed`); only for a model with experts. On a GPU this
    waits for each step, and steps are not replayed as graphs."""


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The size limits of a batch. Each later `SchedulerConfig` adds its own settings."""

    max_num_seqs: PositiveInt | None = None
    """Maximum number of running requests. None: 16 on a CPU; on CUDA up to 512, by the memory of the device and the KV
    of the model, and at most `max_num_batched_tokens` (`device_limits.py`); m5 runs fewer with drafts."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of new tokens in one step. A prompt runs in one step, so a longer prompt is rejected. None: at
    least `max_model_len` and `max_num_seqs`, so that this limit rejects no prompt, and at least 2,048 on a CPU; on CUDA
    2,048 to 16,384, by the memory of the device."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        num_seqs = self.max_num_seqs or CPU_LIMITS.max_num_seqs  # the least of all devices
        named = self.max_num_batched_tokens
        if named is not None and named < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={named} is less than max_num_seqs={num_seqs}"
                f"{'' if self.max_num_seqs else ' (its default)'}: a step could not run all running requests; set "
                f"max_num_seqs to {named} or less"
            )

    def resolved(self, max_model_len: int, device: DeviceLimits = CPU_LIMITS) -> Self:
        """Return a copy with every None replaced, for a model of `max_model_len` tokens on a device."""
        named = self.max_num_batched_tokens
        num_seqs = self.max_num_seqs or min(device.max_num_seqs, named or device.max_num_seqs)
        budget = named or max(max_model_len, device.max_num_batched_tokens, num_seqs)
        return replace(self, max_num_seqs=num_seqs, max_num_batched_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The size limits of a batch, and the preemption mode."""

    preemption_mode: PreemptionMode = "recompute"
    """Treatment of a preempted request's KV. `recompute`: freed, and computed again later. `swap`: copied to host
    memory and back (`CacheConfig.swap_space_bytes`)."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The size of the KV memory and of its blocks, and the format of its numbers.

    At most one of `kv_cache_memory_bytes`, `gpu_memory_utilization` and `num_blocks` may be given.
    """

    block_size: PositiveInt = 16
    """Tokens per block."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """A budget in bytes. The default on a CPU: 512 MiB, or more if `max_num_seqs` requests of the model's length need
    it, up to 4 GiB or a quarter of the machine's memory, whichever is smaller; with `swap`, half of the part above
    512 MiB. Memory is used only for blocks with tokens."""
    gpu_memory_utilization: Share | None = None
    """On CUDA: the fraction of the device's memory for weights, activations and KV together. A profiling run measures
    the first two; the rest is KV memory. Default on CUDA: 0.9."""
    num_blocks: PositiveInt | None = None
    """Exact number of blocks, even if the longest request does not fit (then that request fails)."""
    swap_space_bytes: PositiveInt | None = None
    """Host memory for swapped-out requests, in bytes; only with `preemption_mode="swap"`. None: as many blocks as on
    the device."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of the numbers in the KV memory. `auto`: the model's precision. `bfloat16`: half the bytes of float32.
    `int8` and `fp8` (e4m3): one byte per number, and a float32 scale per token and head. More tokens fit, and outputs
    change a little."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check_one_given(self, "kv_cache_memory_bytes", "gpu_memory_utilization", "num_blocks")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SingleRequestConfig):
    """The whole configuration of an m3 engine. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    trace: TraceConfig | SingleRequestTraceConfig = field(default_factory=TraceConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)


def check_one_given(config: Any, *names: str) -> None:
    """Raise `ConfigError` if more than one of these settings is given; each of them sets the size of the KV memory."""
    given = [name for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both set the size of the KV memory: give one of them")
