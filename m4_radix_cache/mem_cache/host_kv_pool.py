"""Host memory for KV pages, and the forwards that wait for pages from it.

m3's swap copied the blocks of a request before a step, and the step waited for all of them. Here copies run beside the
steps, layer by layer: the forward of a layer waits for the KV of that layer only (`arriving`). A page is all that is
kept of its tokens: K and V of each layer, with the scales of a quantised KV and the draft model's KV. SGLang:
`mem_cache/memory_pool_host.py`.
"""

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from m1_single_request.errors import ConfigError
from m1_single_request.trace_event import size
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.native_linear import on_huge_pages
from m3_paged_attention.kv_cache_spec import KVCacheSpec
from m3_paged_attention.kv_dtype import LARGEST
from m3_paged_attention.kv_storage import KVLayer, KVStorage
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.host_copies import CopyJob, StreamCopier, ThreadCopier, runs_of
from m4_radix_cache.mem_cache.native_copies import NativeCopier
from m4_radix_cache.mem_cache.page_file import BufferSpec

MADV_POPULATE_WRITE = 23  # of Linux; Python's mmap has no name for it
POPULATED_AT_ONCE = 2**26  # bytes, so that Ctrl-C is noticed in between
DISK_S = 1.0
"""Time for which an allocation waits for pages that the disk tier uses, once: a disk that takes longer hangs."""


class HostKVPool:
    """`num_pages` pages in host memory."""

    def __init__(self, storages: Sequence[KVStorage], *, num_bytes: int) -> None:
        """`storages`: KV memory of the models, in the order in which a step reads them. Raises `ConfigError` if the
        machine has less memory, or `num_bytes` is less than a page."""
        self.page_bytes = sum(storage.config.spec.block_bytes for storage in storages)
        self.num_pages = num_bytes // self.page_bytes
        if not self.num_pages:
            raise ConfigError(f"host_memory_bytes={num_bytes} is less than a page of KV, {size(self.page_bytes)}")
        self.storages = list(storages)
        self._device_layers = [layer for storage in storages for layer in _layers(storage.blocks)]
        try:
            host = [self._allocate(storage.blocks) for storage in storages]
        except (RuntimeError, TypeError, OSError, OverflowError) as error:  # out of memory, or a number too large for C
            raise ConfigError(f"host_memory_bytes={num_bytes} cannot be allocated: {error}") from error
        self._host_layers = [layer for blocks in host for layer in _layers(blocks)]
        to_host = list(zip(self._device_layers, self._host_layers, strict=True))
        self._pairs = {"write": to_host, "load": [(host, device) for device, host in to_host]}
        self.layout: dict[str, BufferSpec] = {}
        """The buffers of a page, by name: those of `buffers`."""
        self._parts: list[Any] = []  # of each buffer, uint8 [num_layers, num_pages, bytes]
        for blocks, spec, prefix in zip(
            host, (s.config.spec for s in storages), ("draft_", "")[-len(storages) :], strict=True
        ):
            for kind, name in enumerate(("keys", "values")):
                plane = _planes(blocks)[kind::2]
                for suffix, buffer in _buffers_of(spec):
                    self.layout[prefix + name + suffix] = buffer
                    width = buffer.num_bytes // spec.num_layers
                    self._parts.append(plane[..., :width])
                    plane = plane[..., width:]
        device = storages[0].blocks.device
        self.copiers: dict[str, Any] = {  # so that a load is not queued behind writes
            kind: _copier(device) for kind in ("write", "load")
        }
        self.before_load: Callable[[], object] = lambda: None
        """Called before a load: a step in flight may still write to the pages, which a retracted request has left."""
        self._loads: list[CopyJob] = []
        self._changed = threading.Condition()
        self._held = Counter[int]()  # pages that the disk tier reads or writes
        self._stuck = set[int]()  # those that an allocation has waited for in vain
        self.clear()

    def _allocate(self, blocks: torch.Tensor) -> torch.Tensor:
        shape = (blocks.shape[0], self.num_pages, *blocks.shape[2:])
        if blocks.device.type == "cuda":
            return torch.empty(shape, dtype=blocks.dtype, pin_memory=True)
        memory = on_huge_pages(prod(shape) * blocks.element_size())
        _populate(memory)
        return memory.view(blocks.dtype).view(shape)

    # --- pages --------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Take all pages back. No copy may be in flight."""
        with self._changed:
            self._loads = []
            self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in self._held]
            self._leaving = set(self._held)

    def available(self) -> int:
        """Return the number of free pages, with those that are free as soon as the disk tier has read them."""
        with self._changed:  # the disk tier's threads move pages from one to the other
            return len(self._free) + len(self._leaving)

    def num_missing(self, num_pages: int) -> int:
        """Return how many pages must be freed before `num_pages` can be allocated; at most 0: none."""
        with self._changed:
            return num_pages - (len(self._free) if self._stuck else self.available())

    def alloc(self, num_pages: int) -> Slots | None:
        """Allocate pages; None, and no change, if fewer are free. Waits for the disk tier, if it must, for a moment."""
        with self._changed:
            if self.num_missing(num_pages) > 0:
                return None
            if not self._changed.wait_for(lambda: len(self._free) >= num_pages, DISK_S):
                self._stuck = set(self._leaving)
                return None
            taken = self._free[len(self._free) - num_pages :]
            del self._free[len(self._free) - num_pages :]
        return np.array(taken[::-1], dtype=np.int64)

    def free(self, pages: Slots) -> None:
        """Free pages. Their contents stay while the disk tier uses them."""
        with self._changed:
            for page in pages[::-1].tolist():
                if page in self._held:
                    self._leaving.add(page)
                else:
                    self._free.append(page)

    def hold(self, pages: Slots) -> None:
        """Keep the contents of pages for the disk tier, also if they are freed meanwhile."""
        with self._changed:
            self._held.update(pages.tolist())

    def release(self, page: int) -> None:
        """End one `hold` of a page; any thread may."""
        with self._changed:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
                if page in self._stuck:
                    self._stuck.clear()
                if page in self._leaving:
                    self._leaving.remove(page)
                    self._free.append(page)
                    self._changed.notify_all()

    def buffers(self, page: int) -> list[Any]:
        """Return the buffers of a page, in the order of `layout`: bytes in host memory, `[num_layers, bytes]` each."""
        return [part[:, page] for part in self._parts]

    # --- copies -------------------------------------------------------------------------------------------------------

    def write(self, device_pages: Slots, host_pages: Slots) -> CopyJob:
        """Begin to copy pages to the host."""
        return self._start("write", device_pages, host_pages)

    def load(self, host_pages: Slots, device_pages: Slots) -> CopyJob:
        """Begin to copy pages to the device. The forwards from now on wait for them."""
        self.before_load()
        job = self._start("load", host_pages, device_pages)
        self._loads.append(job)
        return job

    def arriving(self, kv: KVStorage, metadata: AttentionMetadata) -> Any:
        """Return the KV memory for a forward: `kv`, or, while pages of it are on their way, one that waits for each
        layer. A forward in one call begins when all of them are there."""
        if not self._loads:
            return kv
        self._loads = [job for job in self._loads if not job.is_done()]
        if kv.step is not None and kv.step.takes(metadata):
            self.wait(kv)
            return kv
        return ArrivingKV(kv, self)

    def wait(self, kv: KVStorage, layer: int | None = None) -> None:
        """Wait until a layer of `kv`, or all of it, has the pages that are being loaded."""
        index = self.storages.index(kv)
        first = sum(storage.config.spec.num_layers for storage in self.storages[:index])
        last = first + (kv.config.spec.num_layers - 1 if layer is None else layer)
        for job in self._loads:
            job.wait(last)

    def close(self) -> None:
        """End the copies, and release the memory."""
        for copier in self.copiers.values():
            copier.close()
        self.storages, self._device_layers, self._host_layers, self._pairs, self._loads = [], [], [], {}, []
        self.copiers, self._parts = {}, []

    def _start(self, kind: Literal["write", "load"], sources: Slots, targets: Slots) -> CopyJob:
        copier = self.copiers[kind]
        job: CopyJob = copier.job(kind, self._pairs[kind], runs_of(sources, targets))
        copier.start(job)
        return job


class ArrivingKV:
    """The KV memory of a forward that runs layer by layer while pages arrive."""

    step = None

    def __init__(self, kv: KVStorage, pool: HostKVPool) -> None:
        self.kv, self.pool = kv, pool

    def layer(self, index: int) -> KVLayer:
        """Return the KV tensors of a layer when its pages are there."""
        self.pool.wait(self.kv, index)
        return self.kv.layer(index)


def _populate(memory: torch.Tensor) -> None:
    """Let Linux give the process this memory now, where it can (from 5.14 on), as long as some is free. Otherwise the
    first write to each page waits for it, on a virtual machine for longer than the copy takes."""
    if sys.platform != "linux":
        return
    madvise, page_size = ctypes.CDLL(None).madvise, os.sysconf("SC_PAGE_SIZE")
    for start in range(0, memory.nbytes, POPULATED_AT_ONCE):
        if os.sysconf("SC_AVPHYS_PAGES") * page_size < 4 * POPULATED_AT_ONCE:
            return
        length = min(POPULATED_AT_ONCE, memory.nbytes - start)
        madvise(ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(length), MADV_POPULATE_WRITE)


def _copier(device: torch.device) -> Any:
    """Return what copies between this device and the host."""
    if device.type == "cuda":
        return StreamCopier(device)
    return ThreadCopier() if native_library.obstacle() is not None else NativeCopier()


def _buffers_of(spec: KVCacheSpec) -> list[tuple[str, BufferSpec]]:
    """Return the buffers of the keys, or of the values, of a page: the suffix of the name, type and shape."""
    shape = (spec.num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim)
    numbers = ("", BufferSpec(str(spec.dtype).removeprefix("torch."), shape))
    scales = ("_scales", BufferSpec("float32", (spec.num_layers, spec.num_kv_heads, spec.block_size)))
    return [numbers, scales] if spec.dtype in LARGEST else [numbers]


def _planes(blocks: torch.Tensor) -> Any:
    """Return the bytes of host memory, of numpy: `[2 * num_layers, num_pages, bytes]`."""
    return blocks.view(torch.uint8).view(*blocks.shape[:2], -1).numpy()


def _layers(blocks: torch.Tensor) -> list[Any]:
    """Return K and V of each layer as bytes: views `[2, pages, bytes]`, of numpy without a GPU."""
    planes, pages = blocks.shape[:2]
    raw = blocks.view(torch.uint8).view(planes // 2, 2, pages, -1)
    return list(raw if blocks.is_cuda or blocks.is_pinned() else raw.numpy())
