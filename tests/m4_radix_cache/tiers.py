"""A second tier for the engines of the equivalence tests, as Hypothesis draws it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from tests.m4_radix_cache.late_copies import LatePool


class Counting(HiRadixCache):
    """A cache that counts."""

    num_failed = num_written = num_host_evicted = 0

    def _write(self, nodes: list[Any], rids: Any) -> Any:
        job = super()._write(nodes, rids)
        self.num_written += 0 if job is None else job.num_pages * self.page_size
        return job

    def evict_host(self, num_pages: int, rids: Any = ()) -> int:
        freed = super().evict_host(num_pages, rids)
        self.num_host_evicted += freed * self.page_size
        return freed

    def _acknowledge(self) -> None:
        job = self._jobs[0]
        super()._acknowledge()
        self.num_failed += job.error is not None


class CountingDisk(Counting, DiskRadixCache):
    """The same over a disk, which is asked for single pages, too."""

    least_prefetched = 1


@dataclass(frozen=True)
class Tiers:
    """Settings of a host tier whose copies are late, and of a disk below it."""

    host_tokens: int
    write_policy: Any
    least_loaded: int
    seed: int
    failing: float
    disk_path: Path
    prefetch_policy: str | None
    """None: without the disk."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The fields of `CacheConfig`; the pool has a size of its own."""
        disk = {"disk_path": self.disk_path, "prefetch_policy": self.prefetch_policy}
        host = {"cache": "radix", "host_memory_bytes": 1, "write_policy": self.write_policy}
        return host if self.prefetch_policy is None else host | disk

    def parts(self, page_size: int) -> Mapping[str, Any]:
        num_pages = -(-self.host_tokens // page_size)
        pool = partial(LatePool, num_pages=num_pages, rng=Random(self.seed), failing=self.failing)
        caches = {"tiered_cache": Counting, "disk_cache": CountingDisk}
        least = {"least_loaded": self.least_loaded}
        return {"host_kv_pool": pool} | {role: type("Cache", (own,), least) for role, own in caches.items()}


POLICIES = (None, None, "best_effort", "wait_complete", "timeout")


COPIES = ("loaded", "written", "evicted from the host", "from the disk", "failed")


def tiers_of(cache: str, disk_path: Path) -> st.SearchStrategy[Any]:
    """The tiers of a cache of this name."""
    if cache != "tiers":
        return st.none()
    return st.builds(
        Tiers,
        host_tokens=st.sampled_from([16, 48, 100, 400, 400]),
        write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        least_loaded=st.sampled_from([1, 1, 10]),
        seed=st.integers(0, 1000),
        failing=st.sampled_from([0, 0, 0.1]),
        disk_path=st.just(disk_path),
        prefetch_policy=st.sampled_from(POLICIES),
    )


def count_copies(engine: Any) -> Counter[str]:
    """How many tokens were copied between the tiers."""
    cache = engine.engine_core.scheduler.tree_cache
    if not isinstance(cache, Counting):
        return Counter()
    return Counter(
        {
            "loaded": cache.num_loaded_tokens,
            "written": cache.num_written,
            "evicted from the host": cache.num_host_evicted,
            "failed": cache.num_failed,
            "from the disk": cache.num_disk_hit_tokens,
        }
    )
