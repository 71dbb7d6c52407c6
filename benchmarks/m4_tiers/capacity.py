"""Share of the recorded tokens that each tier has, against its capacity. No model runs: these are the books alone.

A request is looked up, loaded, given slots, and inserted, as in `benchmarks/m4/caches.py`. Copies and files are real
and small. What is read from the disk is complete before the request starts, and what is written is complete before the
next one: so the shares are the same on every machine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.lesson import Row
from benchmarks.m4.caches import Server
from benchmarks.m4.traffic import describe, recorded
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.disk_store import DiskStore
from m4_radix_cache.mem_cache.disk_tier import DiskTier, Prefetch
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey

PAGE_SIZE = 16
SPEC = KVCacheSpec(block_size=PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
DEVICE, HOST = 2**14, 2**15  # tokens: the device of all rows, and the host memory of those with a disk
HOSTS = tuple(2**n for n in range(14, 20))
DISKS = tuple(2**n for n in range(16, 21))


class DirectDisk(DiskTier):
    """A disk tier that reads and writes when it is called."""

    def write(self, digests: Sequence[bytes], pages: Slots, chain: Sequence[bytes]) -> None:
        for digest, page in zip(digests, pages.tolist(), strict=True):
            self.store.write(digest, self.host.buffers(page))
        self.store.touch(chain)

    def prefetch(self, prefetch: Prefetch) -> None:
        self.host.hold(prefetch.pages)
        prefetch.read(self.store, self.host)


class TieredServer(Server):
    """Requests that pass through a cache with tiers."""

    def find(self, key: RadixKey, limit: int) -> tuple[Slots, Any]:
        """Also bring what is on the disk to host memory, and what is there to the device."""
        cache, req = self.cache, SimpleNamespace(rid="", key=key, match_limit=limit, extend_input_len=0)
        cache.prefetch(req)  # type: ignore[arg-type]
        cache.begin_step()
        req.prefix_indices, req.last_node, req.host_hit_length, req.last_host_node = cache.match_prefix(key, limit)
        cache.inc_lock_ref(req.last_node)
        cache.load_back(req)  # type: ignore[arg-type]
        return req.prefix_indices, req.last_node


def pool_of(num_tokens: int) -> HostKVPool:
    """Return host memory for so many tokens."""
    device = KVStorage(KVCacheConfig(spec=SPEC, num_blocks=DEVICE // PAGE_SIZE), device=torch.device("cpu"))
    return HostKVPool([device], num_bytes=num_tokens // PAGE_SIZE * SPEC.block_bytes)


def tiered_cache(host: int, disk: int, folder: str) -> Any:
    """Return a function that makes the cache; `disk`: 0 is none."""
    pool = pool_of(host)
    if not disk:
        return partial(HiRadixCache, host_pool=pool, write_policy="write_through")

    def open_disk(name: str | None = None) -> DiskTier:
        layout = {"max_bytes": 2**40, "layout": pool.layout, "models": ["recorded"]}
        store = DiskStore(Path(folder), **layout, page_size=PAGE_SIZE, vocab_size=2**30)
        store.max_bytes = disk // PAGE_SIZE * store.file_bytes
        return DirectDisk(store, pool)

    return partial(
        DiskRadixCache,
        host_pool=pool,
        write_policy="write_through",
        open_disk=open_disk,
        prefetch_policy="wait_complete",
    )


def shares(requests: Sequence[tuple[RadixKey, int]], host: int, disk: int) -> Row:
    """Pass all requests through these tiers; return the share of the prompts' tokens that each tier had."""
    with TemporaryDirectory() as folder:
        make = tiered_cache(host, disk, folder) if host else RadixCache
        server = (TieredServer if host else Server)(make, num_tokens=DEVICE, page_size=PAGE_SIZE)
        asked = sum(num_prompt for _, num_prompt in requests)
        found = sum([server.serve(key, num_prompt) for key, num_prompt in requests])
        cache = server.cache
        cache.close()
        of_disk, loaded = cache.num_disk_hit_tokens, cache.num_loaded_tokens
    on_device, on_host = found - loaded, loaded - of_disk
    row = {"host": host, "disk": disk, "on_device": on_device, "on_host": on_host, "on_disk": of_disk, "all": found}
    return {name: value / asked if name not in ("host", "disk") else value for name, value in row.items()}


def capacity(num_requests: int | None = None, hosts: Sequence[int] = HOSTS, disks: Sequence[int] = DISKS) -> Row:
    """Count the shares for growing host memory, and for growing disks below a small one."""
    trace = recorded()[:num_requests]
    requests = [(request.key(), request.prompt) for request in trace]
    tiers = [(0, 0), *((host, 0) for host in hosts), *((HOST, disk) for disk in disks)]
    return {
        "trace": describe(trace),
        "page_size": PAGE_SIZE,
        "device": DEVICE,
        "rows": [shares(requests, *each) for each in tiers],
    }
