"""A tree over two memories, with pages that can be recognised, and which page must be in which memory.

The model knows no nodes: it is the set of pages on the device, and that of pages on the host, each page by its
namespace and all tokens up to its end. Before every operation it is read off the tree, so each operation is judged by
what it has changed. Bytes of a page are a digest of its name, its layer, and K or V.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache as memoized
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np
import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.disk_store import DiskStore
from m4_radix_cache.mem_cache.disk_tier import DiskTier
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_key import RadixKey, decode
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from tests.m4_radix_cache.late_copies import LatePool

Path = tuple[str | None, tuple[int, ...]]  # a namespace and tokens from the start
VOCAB_SIZE = 1000
"""Larger tokens are those of images."""
NUM_LAYERS = (1, 2)
"""Of a draft model and of the target."""


class Call:
    """All layers of a model in one call, for every step."""

    def takes(self, metadata: Any) -> bool:
        return True


@dataclass(frozen=True)
class Sizes:
    """Settings of a tree with two tiers."""

    page_size: int = 4
    num_pages: int = 12
    num_host_pages: int = 12
    write_policy: str = "write_through"
    eviction_policy: str = "lru"
    least_loaded: int = 1
    failing: float = 0.0
    seed: int = 0


@dataclass
class Reader:
    """The least that the cache wants of a request that starts: its match, and where it ends on the host."""

    rid: str
    path: Path
    host_hit_length: int
    last_host_node: Any
    last_node: Any
    prefix_indices: Slots
    cache_protected_len: int
    extend_input_len: int = 0
    is_read: bool = False


@memoized
def contents(path: Path, layer: int, kind: int, num_bytes: int) -> np.ndarray:
    """The bytes of the last page of this path."""
    digest = sha256(repr((path, layer, kind)).encode()).digest()
    return np.resize(np.frombuffer(digest, np.uint8), num_bytes)


@dataclass
class Tiered:
    """A tree over two tiers, on which every operation is checked."""

    sizes: Sizes
    cache_class: type[HiRadixCache] = HiRadixCache
    pool_class: Callable[..., HostKVPool] = LatePool
    disk_path: Any = None
    """With a disk: the cache class is one of three tiers."""
    tracer: Tracer = field(default_factory=Tracer)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.page_size = sizes.page_size
        self.storages = [storage_of(num_layers, sizes) for num_layers in NUM_LAYERS]
        more = {"num_pages": sizes.num_host_pages, "rng": Random(sizes.seed), "failing": sizes.failing}
        self.pool: Any = self.pool_class(self.storages, num_bytes=1, **more)
        self.allocator = TokenToKVPoolAllocator(
            size=sizes.num_pages * self.page_size, page_size=self.page_size, checked=True
        )
        own = type("Cache", (self.cache_class,), {"least_loaded": sizes.least_loaded})
        self.cache: Any = own(
            host_pool=self.pool,
            write_policy=sizes.write_policy,
            req_to_token_pool=ReqToTokenPool(size=4, max_context_len=256),
            token_to_kv_pool_allocator=self.allocator,
            eviction_policy=sizes.eviction_policy,
            tracer=self.tracer,
            **({"open_disk": self.open_disk, "prefetch_policy": "wait_complete"} if self.disk_path else {}),
        )
        self.readers: list[Reader] = []
        self.has_evicted = False

    def open_disk(self, name: str | None = None) -> DiskTier:
        store = DiskStore(
            self.disk_path,
            max_bytes=2**24,
            layout=self.pool.layout,
            models=["draft", "target"],
            page_size=self.page_size,
            vocab_size=VOCAB_SIZE,
        )
        return DiskTier(store, self.pool)

    # --- what is where ------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[tuple[Any, Path, int]]:
        """Each node, the path to its end, and the number of tokens above it."""
        stack = [(child, child.edge[0], ()) for child in self.cache.root.children.values()]
        while stack:
            node, space, above = stack.pop()
            tokens = (*above, *decode(node.key))
            yield node, (space, tokens), len(above)
            stack += [(child, space, tokens) for child in node.children.values()]

    def pages(self, path: Path, start: int = 0) -> list[Path]:
        """The whole pages of a path from this token on."""
        size, (space, tokens) = self.page_size, path
        return [(space, tokens[: end + size]) for end in range(start, len(tokens) - size + 1, size)]

    def where(self) -> tuple[set[Path], set[Path]]:
        """The pages on the device, and those on the host."""
        device: set[Path] = set()
        host: set[Path] = set()
        for node, path, start in self.nodes():
            pages = self.pages(path, start)
            device.update(pages if len(node.value) else ())
            host.update(pages if node.is_backed else ())
        return device, host

    def found(self, path: Path) -> tuple[list[Path], list[Path]]:
        """What a match must find on the device, and behind it only on the host."""
        device, host = self.where()
        pages = self.pages(path)
        num_device = next((i for i, page in enumerate(pages) if page not in device), len(pages))
        behind = pages[num_device:]
        num_host = next((i for i, page in enumerate(behind) if page not in host), len(behind))
        return pages[:num_device], behind[:num_host]

    def locked(self) -> set[Path]:
        return {page for reader in self.readers for page in self.pages(reader.path)[: self.num_pages_of(reader)]}

    def num_pages_of(self, reader: Reader) -> int:
        return len(reader.prefix_indices) // self.page_size

    # --- operations ---------------------------------------------------------------------------------------------------

    def match(self, path: Path, limit: int | None = None) -> Any:
        wanted = path if limit is None else (path[0], path[1][: max(0, limit)])
        before, (device, host) = self.where(), self.found(wanted)
        match = self.cache.match_prefix(RadixKey(path[1], path[0]), limit)
        assert len(match.device_indices) == len(device) * self.page_size
        on_host = len(host) * self.page_size
        assert match.host_hit_length == (on_host if on_host >= self.sizes.least_loaded else 0)
        assert self.where() == before, "a look-up moved pages"
        return match

    def insert(self, path: Path, priority: int = 0) -> None:
        """As of a request that has computed everything itself; its duplicates are freed."""
        whole: Path = (path[0], path[1][: len(path[1]) // self.page_size * self.page_size])
        if len(whole[1]) > self.allocator.available_size():
            self.evict(len(whole[1]) - self.allocator.available_size())
        slots = self.allocator.alloc(len(whole[1]))
        if slots is None or not len(slots):
            return
        pages, (device, host), free = self.pages(whole), self.where(), self.pool.available()
        self.compute(pages, slots)
        existing = self.cache.insert(RadixKey(path[1], path[0], "new"), slots, priority)
        self.allocator.free(slots[:existing])  # raises if the cache freed or kept one of them
        self.garble_free()
        now_device, now_host = self.where()
        assert now_device == device | set(pages)
        assert existing == len([page for page in pages if page in device]) * self.page_size
        missing = set(pages) - host
        if self.sizes.write_policy != "write_through":
            assert now_host == host
        elif not self.sizes.failing:
            assert now_host - host <= missing and host - now_host <= host - device, "other pages moved"
            if free >= len(missing):
                assert now_host == host | missing, "there was room on the host"

    def compute(self, pages: list[Path], slots: Slots) -> None:
        """Write what these pages must contain."""
        for layer, planes in enumerate(self.pool._device_layers):
            for page, number in zip(pages, (slots[:: self.page_size] // self.page_size).tolist(), strict=True):
                for kind in range(2):
                    planes[kind, number] = contents(page, layer, kind, planes.shape[-1])

    def garble_free(self) -> None:
        """What nobody owns may be written by anybody."""
        owned = self.allocator.owned_pages()
        for planes in self.pool._device_layers:
            free = np.setdiff1d(np.arange(1, planes.shape[1]), owned)
            planes[:, free] = 0x37

    def start(self, path: Path) -> None:
        """A request that starts from what is cached, and loads what the host has."""
        match = self.match(path)
        device, host = self.found(path)
        reader = Reader(
            "reader", path, match.host_hit_length, match.last_host_node, match.last_device_node,
            match.device_indices, len(match.device_indices),
        )  # fmt: skip
        self.cache.inc_lock_ref(reader.last_node)
        room = self.allocator.available_size() + self.cache.evictable_size()
        fits = 0 < reader.host_hit_length <= room
        self.has_evicted |= self.allocator.available_size() < reader.host_hit_length
        before = self.where()
        self.cache.load_back(reader)
        self.readers.append(reader)
        self.garble_free()
        assert reader.host_hit_length == 0 and reader.last_host_node is None
        pages = device + host if fits else device
        assert len(reader.prefix_indices) == len(pages) * self.page_size == reader.cache_protected_len
        assert reader.extend_input_len == (0 if fits or not match.host_hit_length else match.host_hit_length)
        now_device, now_host = self.where()
        assert set(pages) <= now_device and now_device - before[0] <= set(pages)
        assert set(host) <= now_host, "the host lost what is being loaded"
        self.cache.record_hit(reader.last_node)

    def read(self, *, at_once: bool = False) -> None:
        """A forward: each layer reads all that is locked, when its time has come."""
        layer = 0
        for storage in self.storages:
            storage.step = Call() if at_once else None  # type: ignore[assignment]
            view = self.pool.arriving(storage, None)
            for own in range(storage.config.spec.num_layers):
                view.layer(own)
                for reader in self.readers:
                    self.check_slots(self.pages(reader.path), reader.prefix_indices, layer)
                layer += 1
        for reader in self.readers:
            reader.is_read = True

    def check_slots(self, pages: list[Path], slots: Slots, layer: int) -> None:
        self.check_bytes(
            pages[: len(slots) // self.page_size],
            slots[:: self.page_size] // self.page_size,
            layer,
            self.pool._device_layers[layer],
        )

    def check_bytes(self, pages: list[Path], numbers: Slots, layer: int, planes: Any) -> None:
        for page, number in zip(pages, numbers.tolist(), strict=True):
            for kind in range(2):
                right = contents(page, layer, kind, planes.shape[-1])
                assert np.array_equal(planes[kind, number], right), f"page {number} of layer {layer} has other bytes"

    def unlock(self, index: int) -> None:
        self.cache.dec_lock_ref(self.readers.pop(index % len(self.readers)).last_node)

    def record_hit(self, index: int) -> None:
        before = self.where()
        self.cache.record_hit(self.readers[index % len(self.readers)].last_node)
        assert self.where()[0] == before[0]

    def evict(self, num_tokens: int) -> None:
        (device, host), free = self.where(), self.pool.available()
        evictable = self.cache.evictable_size()
        freed = self.cache.evict(num_tokens)
        self.has_evicted |= freed > 0
        self.garble_free()
        assert freed >= min(num_tokens, evictable) and (freed == 0 or num_tokens > 0)
        now_device, now_host = self.where()
        gone = device - now_device
        assert now_device <= device and len(gone) * self.page_size == freed and not gone & self.locked()
        if self.sizes.failing:
            return
        lost = {page for page in host if any(is_below(page, above) for above in gone - now_host)}
        if self.sizes.write_policy != "write_back":
            assert now_host == host - lost, "what is evicted from the device stays on the host"
        else:
            assert now_host <= host | gone and host - now_host <= host - now_device
            if free >= len(gone - host):
                assert now_host == host | gone, "there was room on the host"

    def evict_host(self, num_pages: int) -> None:
        device, host = self.where()
        freed = self.cache.evict_host(num_pages)
        now_device, now_host = self.where()
        assert now_device == device and now_host <= host and len(host - now_host) == freed
        assert freed >= min(num_pages, len(host - device)) and not (host - now_host) & device

    def arrive(self, path: Path, start: int) -> None:
        """Pages from elsewhere (a disk), for the tokens from the start of this page on."""
        pages = self.pages(path)[start:]
        own = self.cache._host_pages(len(pages), []) if pages else None
        if own is None:
            return
        for layer, planes in enumerate(self.pool._host_layers):
            for page, number in zip(pages, own.tolist(), strict=True):
                for kind in range(2):
                    planes[kind, number] = contents(page, layer, kind, planes.shape[-1])
        device, host = self.where()
        first = self.pages(path)[:start]
        node = self.cache._insert_on_host(RadixKey(path[1], path[0]), start * self.page_size, own)
        now_device, now_host = self.where()
        assert now_device == device
        known = all(page in device | host for page in first)
        assert now_host == (host | {page for page in pages if page not in device | host} if known else host)
        assert (node is None) == (now_host == host)

    def begin_step(self) -> None:
        device, host = self.where()
        self.cache.begin_step()
        now_device, now_host = self.where()
        assert now_device == device
        if not self.sizes.failing:
            assert host <= now_host and (host == now_host or self.disk_path)

    def prefetch(self, path: Path, rid: str) -> None:
        """A request has arrived; the disk may have what it needs."""
        device, host = self.where()
        self.cache.cancel_prefetch(rid)
        self.cache.prefetch(FakeReq(rid, RadixKey(path[1], path[0]), len(path[1])))
        self.cache.begin_step()
        now_device, now_host = self.where()
        assert now_device == device and (self.sizes.failing or host - now_host <= host - device)
        assert not self.cache.is_waiting(FakeReq(rid)) or any(page not in device | host for page in self.pages(path))

    def wait_for_disk(self) -> None:
        """Until all pages are written that can be, and read that are asked for."""
        while self.cache._jobs:
            self.cache._acknowledge()
        while self.cache.wait_for_disk():
            self.begin_step()
        self.cache.disk._writer.submit(lambda: None).result()

    def reset(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        assert self.pool.available() == self.pool.num_pages and self.where() == (set(), set())

    # --- between operations -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Sizes are those of the nodes, and every page that is complete has its bytes."""
        self.cache.check_invariants()
        device, host = self.where()
        sizes = self.cache.evictable_size() + self.cache.protected_size()
        assert sizes == len(device) * self.page_size == self.allocator.size - self.allocator.available_size()
        assert self.cache.host_size() == (len(host) + self.cache._num_arriving()) * self.page_size
        assert self.locked() <= device
        if self.sizes.write_policy == "write_back" and not self.has_evicted:
            assert not host or self.disk_path, "written before the first eviction"
        for node, path, start in self.nodes():
            assert node.host_ref == 0
            pages = self.pages(path, start)
            for layer, (device_planes, host_planes) in enumerate(
                zip(self.pool._device_layers, self.pool._host_layers, strict=True)
            ):
                if len(node.value) and (node.job is None or node.job.kind == "write"):
                    self.check_bytes(pages, self.cache._pages(node.value), layer, device_planes)
                if node.is_backed and (node.job is None or node.job.kind == "load"):
                    self.check_bytes(pages, node.host_pages, layer, host_planes)

    def end(self) -> None:
        """Without locks everything can go."""
        self.read()
        if self.disk_path:
            self.wait_for_disk()
        while self.readers:
            self.unlock(0)
        self.evict(self.allocator.size)
        assert self.allocator.available_size() == self.allocator.size
        self.evict_host(self.pool.num_pages)
        assert self.pool.available() == self.pool.num_pages
        self.cache.close()


@dataclass
class FakeReq:
    """The least that the disk tier wants of a request."""

    rid: str
    key: Any = None
    match_limit: int = 0


def is_below(page: Path, above: Path) -> bool:
    return page[0] == above[0] and page[1][: len(above[1])] == above[1]


def storage_of(num_layers: int, sizes: Sizes) -> KVStorage:
    spec = KVCacheSpec(
        block_size=sizes.page_size, num_layers=num_layers, num_kv_heads=1, head_dim=2, dtype=torch.float32
    )
    return KVStorage(KVCacheConfig(spec=spec, num_blocks=sizes.num_pages), device=torch.device("cpu"))
