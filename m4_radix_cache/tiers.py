"""Tiers below the device's KV memory, as the configuration names them: host memory, and a directory on a disk."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from m3_paged_attention.config import ModelConfig
from m3_paged_attention.model_loader import weights_directory
from m3_paged_attention.models.weights import weight_files
from m4_radix_cache.config import CacheConfig, EngineConfig
from m4_radix_cache.mem_cache.disk_identity import FileState, model_identity, states_in
from m4_radix_cache.mem_cache.disk_store import DiskStore
from m4_radix_cache.mem_cache.disk_tier import DiskTier
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.page_file import PageFile

DISK_BYTES = 10 * 2**30

FileStates = Mapping[str, FileState] | None
"""States of a model's files before it was loaded; None if they cannot change."""


class WatchedLoader:
    """The part `model_loader`. With a disk tier it keeps the states of a model's files from before it is loaded: what
    lies there when they are hashed may be another checkpoint."""

    def __init__(self, load: Callable[..., Any], config: CacheConfig) -> None:
        self._load, self._has_disk = load, config.disk_path is not None
        self.states: dict[str, FileStates] = {}
        """By the model's name."""

    def __call__(self, config: ModelConfig, **more: Any) -> Any:
        """Load a model."""
        name = str(config.model)
        if self._has_disk and name not in self.states:  # engines may share what was loaded once
            self.states[name] = states_in(name)
        return self._load(config, **more)


def tiers_of(
    config: EngineConfig, loader: WatchedLoader, loaded: Sequence[Any], runner: Any, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the tiers; return the keywords that a cache takes for them, none without tiers.

    `loaded`: the models whose KV is in a page, in the order of the runner's host pool, the target last; `loader` has
    loaded them. Raises `ConfigError` and `ModelLoadError`.
    """
    cache = config.cache
    if not cache.host_memory_bytes:
        return {}
    host = runner.use_host_memory(partial(parts["host_kv_pool"], num_bytes=cache.host_memory_bytes))
    tiers = {"host_pool": host, "write_policy": cache.write_policy or "write_through"}
    if cache.disk_path is None:
        return tiers
    opener = partial(open_disk, config, host, loader, loaded)
    return tiers | {"open_disk": opener, "prefetch_policy": cache.prefetch_policy or "timeout"}


def open_disk(
    config: EngineConfig, host: HostKVPool, loader: WatchedLoader, loaded: Sequence[Any], other: str | None
) -> DiskTier:
    """Open the directory for the target's own weights (None), or for those of another model, whose files the caller
    watches."""
    cache, capacity, target = config.cache, config.cache.disk_bytes or DISK_BYTES, loaded[-1]
    assert cache.disk_path is not None
    PageFile(host.layout).check_capacity(capacity)  # before the directory is created
    files = [(each, each.name, loader.states.get(each.name)) for each in loaded]
    if other is not None:
        files[-1] = (target, other, None)
    store = DiskStore(
        cache.disk_path,
        max_bytes=capacity,
        layout=host.layout,
        models=[identity_of(config.model, *each, cache.disk_path) for each in files],
        page_size=cache.page_size,
        vocab_size=target.vocab_size,
    )
    return DiskTier(store, host)


def identity_of(config: ModelConfig, loaded: Any, name: str, loaded_from: FileStates, directory: str | Path) -> str:
    """Return the identity of a loaded model with the weights of `name`: its files, and what else its KV depends on."""
    backend = loaded.model.backend.name
    settings = {"dtype": str(loaded.dtype), "quantization": config.quantization, "backend": backend}
    if config.load_format == "dummy":
        settings |= {"shape": repr(loaded.model.config), "seed": config.seed}
        settings |= {"device": loaded.device.type, "torch": torch.__version__}
        return model_identity([], settings, directory)
    where = weights_directory(name)
    return model_identity([where / "config.json", *weight_files(name, where)], settings, directory, loaded_from)
