"""Size of the KV memory: the number of blocks, computed without tensors.

m2 reserved `max_num_seqs` slots of `max_model_len` tokens, used or not. Here the number of blocks has one of three
sources: the number itself, a budget in bytes, or on CUDA a share of the device's memory, less the peak of a profiling
run. `kv_budget` chooses the source and the default; `size_kv_cache` turns bytes into blocks. A budget in bytes or a
share gives at most the blocks that the requests can fill. A size that does not work is an error that names one that
does. A length that the user did not set is fitted to the memory (`model_len.py`). vLLM: `v1/core/kv_cache_utils.py`;
SGLang: `profile_max_num_token` in `model_executor/model_runner_kv_cache_mixin.py`.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from m1_single_request.errors import ConfigError
from m1_single_request.trace_event import size, some
from m1_single_request.tracer import Tracer
from m2_continuous_batching.memory import available_memory
from m3_paged_attention.config import (
    CPU_KV_BYTES,
    GPU_MEMORY_UTILIZATION,
    MAX_CPU_KV_BYTES,
    CacheConfig,
    PreemptionMode,
)
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec, MemoryProfile


class KVMemorySettings(Protocol):
    """The settings of a cache configuration for the device's memory. At most one of the three is given."""

    @property
    def num_blocks(self) -> int | None: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def gpu_memory_utilization(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Budget of the KV memory. Exactly one of `num_blocks` and `num_bytes` is given."""

    source: str
    """The name of the setting that it comes from."""
    num_blocks: int | None = None
    num_bytes: int | None = None
    share: float | None = None
    profile: MemoryProfile | None = None
    is_default: bool = False
    """True if the user has not set it."""


def check_cache_config(cache_config: CacheConfig, *, preemption_mode: PreemptionMode, device: torch.device) -> None:
    """Raise `ConfigError` for a setting without effect in this configuration. Needs no model."""
    check_memory_share(cache_config, device)
    if cache_config.swap_space_bytes is not None and preemption_mode != "swap":
        raise ConfigError(
            f"swap_space_bytes={cache_config.swap_space_bytes} has no effect with "
            f"preemption_mode={preemption_mode!r}: use preemption_mode='swap'"
        )


def check_memory_share(cache_config: KVMemorySettings, device: torch.device) -> None:
    """Raise `ConfigError` if `gpu_memory_utilization` is given and the device is not a GPU."""
    if cache_config.gpu_memory_utilization is not None and device.type != "cuda":
        raise ConfigError(
            f"gpu_memory_utilization={cache_config.gpu_memory_utilization} needs a GPU, and the device is {device}: "
            f"use kv_cache_memory_bytes, or give the size itself"
        )


def size_kv_cache(
    spec: KVCacheSpec,
    *,
    budget: Budget,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int | None,
    swap_space_bytes: int | None,
    size_setting: tuple[str, int],
    tracer: Tracer,
) -> KVCacheConfig:
    """Compute the number of blocks, and emit it with its derivation to the trace.

    `budget`: from `kv_budget`. `max_num_seqs`: limits the blocks to those that so many requests can fill; None: no such
    limit, for a cache that keeps blocks of ended requests. `swap_space_bytes`: for blocks on the host; None: as many as
    on the device. `size_setting`: the user's name of the setting `num_blocks`, and its units per block. Raises
    `ConfigError` if the longest request does not fit (the message names the longest that does), or if the machine has
    too little memory.
    """
    if budget.num_bytes is None:
        assert budget.num_blocks is not None
        fitting = budget.num_blocks + 1
        num_blocks = budget.num_blocks  # not checked: a request that does not fit fails alone
    else:
        fitting = budget.num_bytes // spec.block_bytes
        check_longest(spec, budget, max_model_len)
        num_blocks = fitting - 1
        if max_num_seqs is not None:
            num_blocks = min(num_blocks, max_num_seqs * spec.blocks_for(max_model_len))
    num_host_blocks = num_blocks if swap_space_bytes is None else _num_host_blocks(spec, swap_space_bytes)
    config = KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    default_bytes = (config.num_bytes + config.num_host_bytes * (swap_space_bytes is None)) * budget.is_default
    _check_memory(config, budget, device, size_setting, max(default_bytes - CPU_KV_BYTES, 0))
    tracer.emit(KVSized.of, config, budget, fitting, max_model_len, max_num_seqs)
    return config


def needs_profile(cache_config: KVMemorySettings, device: torch.device) -> bool:
    """Return whether the number of blocks depends on a profiling run."""
    given = cache_config.num_blocks is not None or cache_config.kv_cache_memory_bytes is not None
    return device.type == "cuda" and not given


def kv_budget(
    spec: KVCacheSpec,
    *,
    cache_config: KVMemorySettings,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    size_setting: str,
    profile: MemoryProfile | None = None,
    num_shares: int = 1,
) -> Budget:
    """Return the budget, from one of three sources: a number of blocks, bytes, or a share of the device.

    `profile` is required if `needs_profile` returns True. `max_model_len` and `max_num_seqs` affect only the default on
    a CPU. `num_shares`: number of KV memories of this size in the memory of the device, which divide it. A size that
    the user has set in blocks or bytes is not divided.
    """
    if cache_config.num_blocks is not None:
        return Budget(source=size_setting, num_blocks=cache_config.num_blocks)
    if not needs_profile(cache_config, device):
        named = cache_config.kv_cache_memory_bytes
        num_bytes = named or _cpu_bytes(spec, max_num_seqs * spec.blocks_for(max_model_len), num_shares)
        return Budget(source="kv_cache_memory_bytes", num_bytes=num_bytes, is_default=named is None)
    assert profile is not None, "a share of the device needs a profiling run"
    share = cache_config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    profile = profile.part(num_shares)
    num_bytes = int(profile.total_bytes * share) - profile.used_bytes
    return Budget(source="gpu_memory_utilization", num_bytes=num_bytes, share=share, profile=profile)


def _cpu_bytes(spec: KVCacheSpec, num_blocks: int, num_shares: int) -> int:
    """Return the default on a CPU in bytes: `num_blocks` and block 0, at least `CPU_KV_BYTES`, at most a limit.

    The limit is `MAX_CPU_KV_BYTES` or a quarter of the physical memory, whichever is smaller; its part above
    `CPU_KV_BYTES` is divided by `num_shares`. Free memory has no influence, so the result is the same at every start on
    this machine: a restarted engine of a group must have room for the group's `max_model_len`.
    """
    physical = physical_memory()
    limit = MAX_CPU_KV_BYTES if physical is None else min(MAX_CPU_KV_BYTES, physical // 4)
    if limit > CPU_KV_BYTES:
        limit = CPU_KV_BYTES + (limit - CPU_KV_BYTES) // num_shares
    return max(CPU_KV_BYTES, min(num_blocks * spec.block_bytes, limit) + spec.block_bytes)


def physical_memory() -> int | None:
    """Return the memory of this machine in bytes, or its container's limit; None if the system does not report it."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return machine if limit == "max" else min(machine, int(limit))


def longest_request(spec: KVCacheSpec, budget: Budget) -> int | None:
    """Return the tokens that fit a budget in bytes, without block 0; None for a budget in blocks."""
    if budget.num_bytes is None:
        return None
    return max(budget.num_bytes // spec.block_bytes - 1, 0) * spec.block_size


def check_longest(spec: KVCacheSpec, budget: Budget, max_model_len: int, *, is_named: bool = True) -> None:
    """Raise `ConfigError` unless a budget in bytes has room for one request of `max_model_len` tokens.

    `is_named`: False if the user did not set the length, and it is the minimum that the engine chooses.
    """
    assert budget.num_bytes is not None
    needed, num_blocks = spec.blocks_for(max_model_len), budget.num_bytes // spec.block_bytes - 1
    if num_blocks >= needed:
        return
    needed_bytes = (needed + 1) * spec.block_bytes
    if budget.profile is None:
        remedy = f"{budget.source} of at least {needed_bytes:,}"
    else:
        share = math.ceil(1000 * (needed_bytes + budget.profile.used_bytes) / budget.profile.total_bytes) / 1000
        remedy = f"gpu_memory_utilization of at least {share}" if share <= 1 else "a smaller model"
    longest = max(num_blocks, 0) * spec.block_size
    remedies = [f"max_model_len of at most {longest:,}", remedy] if longest >= 2 else [remedy]
    least = f"a request of {max_model_len:,} tokens, the least that is chosen without max_model_len,"
    raise ConfigError(
        f"{f'max_model_len={max_model_len}' if is_named else least} needs {some(needed, 'block')} of "
        f"{some(spec.block_size, 'token')}, with block 0 {size(needed_bytes)}; {budget.source} leaves "
        f"{size(max(budget.num_bytes, 0))}, which is room for {max(num_blocks, 0):,} besides block 0. Use "
        f"{' or '.join(remedies)}"
    )


def _num_host_blocks(spec: KVCacheSpec, swap_space_bytes: int) -> int:
    if 0 < swap_space_bytes < spec.block_bytes:
        raise ConfigError(f"swap_space_bytes={swap_space_bytes} is less than one block: {spec.block_bytes:,} bytes")
    return swap_space_bytes // spec.block_bytes


def _check_memory(
    config: KVCacheConfig, budget: Budget, device: torch.device, size_setting: tuple[str, int], optional_bytes: int
) -> None:
    """Raise `ConfigError` if the machine has too little memory, before the allocation.

    A share of a CUDA device was already measured. Blocks on the host and blocks on a CPU use the same memory.
    `optional_bytes`: bytes that need not be free now. They are a default, and take memory only when tokens are written.
    """
    required = {device: config.num_bytes} if budget.profile is None else {}
    host = torch.device("cpu")
    if config.num_host_blocks:
        required[host] = required.get(host, 0) + config.num_host_bytes
    for place, num_bytes in required.items():
        available = available_memory(place)
        if available is None or num_bytes - optional_bytes <= available:
            continue
        blocks, remedy = f"{config.num_blocks_total:,} blocks on {device}", f"a smaller {budget.source}"
        if config.num_host_blocks:
            blocks += f" and {config.num_host_blocks:,} on the host"
            remedy += " or swap_space_bytes"
        elif (num_blocks := available // config.spec.block_bytes - 1) >= 1:
            name, units = size_setting
            remedy = f"{name} of at most {num_blocks * units:,}"
        raise ConfigError(
            f"KV memory of {blocks} takes {size(num_bytes)} of {place} memory, of which {size(available)} is "
            f"available. Use {remedy}"
        )
