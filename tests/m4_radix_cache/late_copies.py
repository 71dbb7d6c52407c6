"""Copies between device and host that are late, out of order, or fail, as a seed says; and what they must not show.

What is still to be loaded is filled with garbage first, and so are pages of the host that are taken: whoever reads them
before their time gets other tokens.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from m3_paged_attention.kv_storage import KVStorage
from m4_radix_cache.mem_cache.host_copies import ThreadJob
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool

GARBAGE = 0x71


class LateJob(ThreadJob):
    """A copy that its copier has, until somebody waits for it."""

    copier: "LateCopier"

    def wait(self, layer: int | None = None) -> None:
        last = len(self.layers) - 1 if layer is None else layer
        while self in self.copier.pending and self._done <= last:
            self.advance()
        super().wait(layer)

    def advance(self) -> None:
        """Copy the next layer, or fail."""
        if self.copier.rng.random() < self.copier.failing:
            self.error = OSError("the copy has failed")
            self._set(len(self.layers))
        else:
            self.copy_layer(self._done)
            self._set(self._done + 1)
        if self._done == len(self.layers):
            self.copier.pending.remove(self)


class LateCopier:
    """Copies layer by layer: now and then any of the jobs that it has, otherwise when somebody waits."""

    job = LateJob

    def __init__(self, rng: Random, failing: float) -> None:
        self.rng, self.failing = rng, failing
        self.pending: list[LateJob] = []

    def start(self, job: LateJob) -> None:
        job.copier = self
        self.pending.append(job)
        while self.pending and self.rng.random() < 0.6:
            self.rng.choice(self.pending).advance()

    def close(self) -> None:
        self.pending.clear()


class LatePool(HostKVPool):
    """A host pool of `num_pages` pages, whose copies are late. `failing`: the share of layers whose copy fails."""

    def __init__(
        self, storages: Sequence[KVStorage], *, num_bytes: int, num_pages: int, rng: Random, failing: float = 0.0
    ) -> None:
        page_bytes = sum(storage.config.spec.block_bytes for storage in storages)
        super().__init__(storages, num_bytes=num_pages * page_bytes)
        for copier in self.copiers.values():
            copier.close()
        self.copiers = dict.fromkeys(("write", "load"), LateCopier(rng, failing))

    def load(self, host_pages: Any, device_pages: Any) -> Any:
        self.before_load()
        for layer in self._device_layers:
            layer[:, device_pages] = GARBAGE
        return super().load(host_pages, device_pages)

    def alloc(self, num_pages: int) -> Any:
        pages = super().alloc(num_pages)
        if pages is not None:
            for layer in self._host_layers:
                layer[:, pages] = GARBAGE
        return pages
