"""Fit `max_model_len` to the KV memory if the user has not set it: the model's own length, or less.

m2 reserves a slot of the model's whole length. A real model supports more tokens than the KV memory of a laptop holds.
So the length is fitted when the memory is measured, before the scheduler and the KV pool are built. New in this
milestone. vLLM: `max_model_len=-1` (`get_kv_cache_configs`); SGLang limits a request by `max_total_num_tokens`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.kv_cache_config import (
    Budget,
    KVMemorySettings,
    check_longest,
    kv_budget,
    longest_request,
    needs_profile,
)

LEAST_MODEL_LEN = 1024
"""Shortest fitted length in tokens. A shorter one is used only if the user set it, or if it is the model's own."""


class Runner(NamedTuple):
    """The parts that run a model with one `max_model_len`. Building them reserves no KV memory."""

    limits: Any
    executor: Any


def fit_model_len(
    loaded: Any,
    make: Callable[[Any], Any],
    *,
    named: int | None,
    cache_config: KVMemorySettings,
    block_size: int,
    device: torch.device,
    size_setting: str,
    num_shares: int = 1,
) -> tuple[Any, Any, Budget]:
    """Measure the memory and fit the length.

    Returns `loaded` with that length, the parts that `make` builds for it, and the memory budget. `named`: the user's
    length, which is never changed. If the user set a number of blocks, the model's own length is kept. `num_shares`: as
    of `kv_budget`. Raises `ConfigError` if fewer than `LEAST_MODEL_LEN` tokens fit, or if the largest step does not.
    """
    least = min(LEAST_MODEL_LEN, loaded.max_model_len)
    while True:
        runs = make(loaded)
        spec, limits = runs.executor.kv_cache_spec(block_size), runs.limits
        try:
            measured = needs_profile(cache_config, device)
            profile = runs.executor.measure_memory(limits.max_num_batched_tokens) if measured else None
            break
        except ConfigError:  # the device may be too small for a step with a prompt of the model's length
            if (
                named is not None
                or limits.max_num_batched_tokens < loaded.max_model_len
                or loaded.max_model_len == least
            ):
                raise
        loaded = replace(loaded, max_model_len=max(loaded.max_model_len // 2, least))
    budget = kv_budget(
        spec,
        cache_config=cache_config,
        device=device,
        max_model_len=loaded.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        size_setting=size_setting,
        profile=profile,
        num_shares=num_shares,
    )
    longest = longest_request(spec, budget)
    if named is not None or longest is None or longest >= loaded.max_model_len:
        return loaded, runs, budget
    check_longest(spec, budget, least, is_named=False)
    return *shortened(loaded, runs, make, longest), budget


def shortened(loaded: Any, runs: Any, make: Callable[[Any], Any], max_model_len: int) -> tuple[Any, Any]:
    """Return `loaded` and its parts, rebuilt for requests of at most `max_model_len` tokens if that is shorter."""
    if max_model_len == loaded.max_model_len:
        return loaded, runs
    loaded = replace(loaded, max_model_len=max_model_len)
    return loaded, make(loaded)
