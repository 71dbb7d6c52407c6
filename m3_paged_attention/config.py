"""What an m3 engine is told: m2's limits, a KV memory in blocks, and which kernels compute.

The model's configuration says two things more than m1's, because from here on the engine owns the forward pass: how
the weights come in, and which backend runs. `execution` of m2 is gone: a flat batch needs no choice. vLLM:
`ModelConfig`, `CacheConfig`, `SchedulerConfig`; SGLang: `ServerArgs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from m1_single_request.config import (
    TraceConfig,
    check_dtype,
    check_model,
    check_whole_number,
    resolve_device,
)
from m1_single_request.errors import ConfigError, shown

LoadFormat = Literal["auto", "dummy"]
AttentionBackend = Literal["auto", "native", "torch", "triton"]
PreemptionMode = Literal["recompute", "swap"]
LEAST_BATCHED_TOKENS = 2048
CPU_KV_BYTES, MAX_CPU_KV_BYTES = 512 * 2**20, 4 * 2**30
GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model runs, where, in which precision, and on which kernels."""

    model: str | Path | None = None
    """A local Hugging Face directory, or a hub id such as `Qwen/Qwen3-0.6B`. None: the checkpoint that ships."""
    device: str = "auto"
    """A torch device. `auto`: CUDA where there is a GPU, else CPU."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`. `auto` on CUDA: what config.json names, bfloat16 where it names float32. On a
    CPU: float32, but bfloat16 for more than 256 MiB of weights that are named so, if the processor multiplies them."""
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
        check_model(self.model)
        check_choice("load_format", self.load_format, LoadFormat)
        check_choice("attention_backend", self.attention_backend, AttentionBackend)
        check_whole_number("max_model_len", self.max_model_len, low=2, optional=True)
        check_whole_number("seed", self.seed)
        check_dtype(self.dtype)
        resolve_device(self.device)

    def torch_device(self) -> torch.device:
        """The device that `device` names."""
        return resolve_device(self.device)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How large a batch may become, and what happens when the KV memory runs out."""

    max_num_seqs: int = 16
    """At most so many requests run at a time."""
    max_num_batched_tokens: int | None = None
    """At most so many new tokens go through the model in one step. A prompt runs whole, so a longer one is refused.
    None: the largest of `max_model_len`, 2,048 and `max_num_seqs`, so that no prompt is refused for it."""
    preemption_mode: PreemptionMode = "recompute"
    """What happens to a preempted request's KV. `recompute`: dropped, and computed again later. `swap`: moved to host
    memory and back (`CacheConfig.swap_space_bytes`)."""

    def __post_init__(self) -> None:
        check_choice("preemption_mode", self.preemption_mode, PreemptionMode)
        check_token_budget(self.max_num_batched_tokens, self.max_num_seqs)

    def resolved(self, max_model_len: int) -> "SchedulerConfig":
        """The same with every None replaced, for a model of this length."""
        budget = self.max_num_batched_tokens or max(max_model_len, LEAST_BATCHED_TOKENS, self.max_num_seqs)
        return replace(self, max_num_batched_tokens=budget)


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
class EngineConfig:
    """Everything an m3 engine can be told. The field `x` is the engine's keyword `x_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


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


def check_token_budget(max_num_batched_tokens: int | None, max_num_seqs: int) -> None:
    """Raise `ConfigError` if a step could not give every running request a token."""
    check_whole_number("max_num_seqs", max_num_seqs, low=1)
    check_whole_number("max_num_batched_tokens", max_num_batched_tokens, low=1, optional=True)
    if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={max_num_batched_tokens} is less than max_num_seqs={max_num_seqs}: not every "
            f"running request could get a token in a step"
        )
