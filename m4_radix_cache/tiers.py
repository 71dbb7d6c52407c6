"""Tiers below the device's KV memory, as the configuration names them: host memory, and a directory on a disk."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from m3_paged_attention.config import ModelConfig
from m3_paged_attention.model_loader import weights_directory
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.mem_cache.disk_identity import model_identity
from m4_radix_cache.mem_cache.disk_store import DiskStore
from m4_radix_cache.mem_cache.disk_tier import DiskTier
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool

DISK_BYTES = 10 * 2**30


def tiers_of(
    config: CacheConfig, model: ModelConfig, loaded: Sequence[Any], runner: Any, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the tiers; return the keywords that a cache takes for them, none without tiers.

    `loaded`: the models whose KV is in a page, in the order of the runner's host pool, the target last. Raises
    `ConfigError` and `ModelLoadError`.
    """
    if not config.host_memory_bytes:
        return {}
    host = runner.use_host_memory(partial(parts["host_kv_pool"], num_bytes=config.host_memory_bytes))
    tiers = {"host_pool": host, "write_policy": config.write_policy or "write_through"}
    if config.disk_path is None:
        return tiers
    opener = partial(open_disk, config, model, loaded, host)
    return tiers | {"open_disk": opener, "prefetch_policy": config.prefetch_policy or "timeout"}


def open_disk(
    config: CacheConfig, model: ModelConfig, loaded: Sequence[Any], host: HostKVPool, name: str | None = None
) -> DiskTier:
    """Open the directory, for the target's own weights (None) or for those of another model."""
    assert config.disk_path is not None
    names = [*(each.name for each in loaded[:-1]), name or loaded[-1].name]
    store = DiskStore(
        config.disk_path,
        max_bytes=config.disk_bytes or DISK_BYTES,
        layout=host.layout,
        models=[identity_of(model, each, own, config.disk_path) for each, own in zip(loaded, names, strict=True)],
        page_size=config.page_size,
        vocab_size=loaded[-1].vocab_size,
    )
    return DiskTier(store, host)


def identity_of(config: ModelConfig, loaded: Any, name: str, directory: Any) -> str:
    """Return the identity of a loaded model with the weights of `name`: its files, and what else its KV depends on."""
    backend = loaded.model.backend.name
    settings = {"dtype": str(loaded.dtype), "quantization": config.quantization, "backend": backend}
    if config.load_format == "dummy":
        settings |= {"shape": repr(loaded.model.config), "seed": config.seed}
        settings |= {"device": loaded.device.type, "torch": torch.__version__}
        return model_identity([], settings, directory)
    where = weights_directory(name)
    return model_identity([where / "config.json", *where.glob("*.safetensors")], settings, directory)
