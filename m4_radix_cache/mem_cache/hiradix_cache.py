"""The tree with a second tier: KV that is evicted from the device stays in host memory, and comes back.

A node has its KV on the device, in host memory or in both, and a copy between them may be under way:

                     insert                    evict                    match
    (computed) --> device --> writing --> both ------> host --> loading ------> both
                      | write fails, or no room |        |
                      +--------- evict ---------+        +--- evict_host ---> (gone)

The nodes on the device are the top of the tree: `evict` takes those without a child on the device, and `evict_host` the
leaves that are only on the host. No decision depends on when a copy ends, so decisions are the same in every run: a
copy is acknowledged after a fixed number of steps, and a part that needs its memory sooner waits for it. `RadixCache`
deletes what it evicts. SGLang: `mem_cache/hiradix_cache.py` of 0.5.7, which locks a node until its copy ends.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from m1_single_request.errors import EngineDeadError
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, MatchResult
from m4_radix_cache.mem_cache.eviction import EvictionHeap
from m4_radix_cache.mem_cache.host_copies import CopyJob
from m4_radix_cache.mem_cache.host_events import (
    Acknowledged,
    Demoted,
    HostEvicted,
    HostFlushed,
    LoadBack,
    Reattached,
    WriteStarted,
)
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.mem_cache.tiered_node import TieredNode
from m4_radix_cache.mem_cache.tree_node import Edge, TreeNode
from m4_radix_cache.request import Req

ACK_STEPS = 2
"""A copy is acknowledged at the start of the second step after the one in which it began."""


class HiRadixCache(RadixCache):
    """The tree over both memories. Sizes are those of the device; `insert`, locks and `_split` know both."""

    node_class: ClassVar[type[TreeNode]] = TieredNode
    keeps_retracted = True
    least_loaded: ClassVar[int] = 10
    """Fewer tokens in host memory are computed again, which is as fast (SGLang: `load_back_threshold`)."""

    def __init__(self, *, host_pool: HostKVPool, write_policy: str, **parts: Any) -> None:
        """`write_policy`: as in `CacheConfig`. `parts`: as of `RadixCache`."""
        self.host, self.write_policy = host_pool, write_policy
        super().__init__(**parts)

    def _start_empty(self) -> None:
        super()._start_empty()
        self._host_candidates = EvictionHeap(self.strategies[self.eviction_policy])  # leaves without KV on the device
        self._jobs: deque[CopyJob] = deque()  # not acknowledged, oldest first
        self._step = 0
        self._lost: list[Any] = []  # nodes that an eviction deletes with those above them
        self.host.clear()

    def reset(self) -> None:
        """Discard what both tiers have."""
        self._end_copies()
        super().reset()

    def _end_copies(self) -> None:
        """Wait for all copies. KV that one has lost is used no more."""
        while self._jobs:
            with suppress(EngineDeadError):
                self._acknowledge()

    def flush_tier(self, tier: str) -> None:
        if tier != "host":
            return super().flush_tier(tier)
        while self._jobs:
            self._acknowledge()
        self.evict_host(self.host.num_pages)
        kept = [node for node in self.nodes() if node.is_backed]
        for node in kept:
            self._forget_host_pages(node)
        self.tracer.emit(HostFlushed.of, kept)

    def host_size(self) -> int:
        """Return the number of tokens that host memory holds."""
        return (self.host.num_pages - self.host.available()) * self.page_size

    def tier_bytes(self) -> dict[str, int]:
        return super().tier_bytes() | {"host_bytes": self.host_size() // self.page_size * self.host.page_bytes}

    # --- match and load back ------------------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """As in the base class. `host_hit_length` tokens more are only on the host, down to `last_host_node`."""
        num_tokens = len(key) if max_len is None else max(0, min(len(key), max_len))
        last, values, found = self._walk(key, num_tokens // self.page_size * self.page_key_bytes, 0)
        node = last
        while not len(node.value) and node is not self.root:
            node = node.parent
        slots = np.concatenate(values) if values else NO_SLOTS
        num_host = found // TOKEN_BYTES - len(slots)
        return MatchResult(slots, node, num_host if num_host >= self.least_loaded else 0, last)

    def _touched(self, last: Any) -> None:
        for node in self._path(last):  # the last one on the device, and the last one on the host
            if node.entry is not None:
                (self._candidates if len(node.value) else self._host_candidates).push(node)

    def load_back(self, req: Req) -> None:
        """Bring all `host_hit_length` tokens of a request to the device, behind its prefix, which is locked: begin to
        copy them, and move the lock. Without room (they count as slots, so there is) they are computed."""
        num_tokens, last, first = req.host_hit_length, req.last_host_node, req.last_node
        req.host_hit_length, req.last_host_node = 0, None
        if not num_tokens:
            return
        allocator = self.token_to_kv_pool_allocator
        self._pin(last, 1)
        if allocator.available_size() < num_tokens:
            self.evict(num_tokens - allocator.available_size(), [req.rid])
        slots = allocator.alloc(num_tokens)
        self._pin(last, -1)
        if slots is None:
            req.extend_input_len += num_tokens
            return
        nodes = [node for node in self._path(last) if not len(node.value)]
        self._put_on_device(nodes, slots)
        job = self.host.load(np.concatenate([node.host_pages for node in nodes]), self._pages(slots))
        self._begin(job, nodes, [req.rid])
        self.num_loaded_tokens += num_tokens
        self.inc_lock_ref(last, req.rid)
        self.dec_lock_ref(first, req.rid)
        req.last_node, req.prefix_indices = last, np.concatenate((req.prefix_indices, slots))
        req.cache_protected_len = len(req.prefix_indices)
        self.tracer.emit(LoadBack.of, self, req.rid, nodes, job)

    def _path(self, node: Any) -> list[Any]:
        """Return the nodes from the first one below the root to `node`."""
        path = []
        while node is not self.root:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _put_on_device(self, nodes: Sequence[Any], slots: Slots) -> None:
        """Give nodes of a path that are only on the host their slots on the device."""
        start = 0
        for node in nodes:
            if node.entry is not None:
                self._host_candidates.discard(node)
            node.value = slots[start : start + node.num_tokens].copy()
            start += node.num_tokens
            if node.parent.entry is not None:
                self._candidates.discard(node.parent)
            node.parent.num_on_device += 1
        self._evictable += start
        if nodes:
            self._candidates.push(nodes[-1])

    # --- insert, and write to the host --------------------------------------------------------------------------------

    def _insert(self, key: RadixKey, value: Slots, priority: int) -> tuple[int, Any]:
        existing, leaf = super()._insert(key, value, priority)
        if self.write_policy == "write_through":
            self._write(self._unbacked(leaf), [key.rid])
        return existing, leaf

    def _attach(self, node: Any, value: Slots, rid: str | None) -> int:
        on_host = [each for each in self._path(node) if not len(each.value)]
        existing = len(value) - sum(each.num_tokens for each in on_host)
        if on_host:
            self._put_on_device(on_host, value[existing:])
            self.tracer.emit(Reattached.of, self, rid, on_host)
        return existing

    def _new_node(self, parent: Any, edge: Edge, key: bytes, value: Slots) -> Any:
        node = super()._new_node(parent, edge, key, value)
        if len(value):
            parent.num_on_device += 1
        return node

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        """As in the base class. Both nodes are in the state of the old one."""
        upper = super()._split(node, num_bytes, rid)
        if len(node.value):  # the new node took the place of the old one among the children
            upper.parent.num_on_device -= 1
            upper.num_on_device = 1
        if node.is_backed:
            num_pages = num_bytes // self.page_key_bytes
            upper.host_pages, node.host_pages = node.host_pages[:num_pages], node.host_pages[num_pages:]
        if node.job is not None:
            upper.job = node.job
            node.job.nodes.append(upper)
        return upper

    def record_hit(self, node: Any, rid: str | None = None) -> None:
        """As in the base class; `write_through_selective` writes nodes from which a request starts."""
        super().record_hit(node, rid)
        if self.write_policy == "write_through_selective":
            self._write(self._unbacked(node), [rid])

    def _unbacked(self, node: Any) -> list[Any]:
        """Return the nodes down to `node` that the host does not have."""
        return [each for each in self._path(node) if not each.is_backed]

    def _write(self, nodes: list[Any], rids: Sequence[str | None]) -> CopyJob | None:
        """Begin to copy the first of these nodes, all on the device, to the host: as many as there is room for."""
        written, pages = [], []
        for node in nodes:
            own = self._host_pages(node.num_tokens // self.page_size, rids)
            if own is None:
                break
            node.host_pages = own
            written.append(node)
            pages.append(own)
        if not written:
            return None
        job = self.host.write(self._pages(np.concatenate([node.value for node in written])), np.concatenate(pages))
        self._begin(job, written, rids)
        self.tracer.emit(WriteStarted.of, self, written, job)
        return job

    def _host_pages(self, num_pages: int, rids: Sequence[str | None]) -> Slots | None:
        """Allocate host pages; evict from the host if they are not free."""
        self.evict_host(self.host.num_missing(num_pages), rids)
        return self.host.alloc(num_pages)

    def _pages(self, slots: Slots) -> Slots:
        return slots[:: self.page_size] // self.page_size

    # --- the copies ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Acknowledge the copies that began `ACK_STEPS` ago."""
        self._step += 1
        while self._jobs and self._jobs[0].step <= self._step - ACK_STEPS:
            self._acknowledge()

    def _begin(self, job: CopyJob, nodes: list[Any], rids: Sequence[str | None]) -> None:
        job.nodes, job.step, job.rids = nodes, self._step, rids
        for node in nodes:
            node.job = job
        self._jobs.append(job)

    def _acknowledge(self) -> None:
        """End the oldest copy; wait for it if it is under way. The pages of a write that failed are free again."""
        job = self._jobs[0]
        job.wait()  # if it is interrupted, the copy is still known
        self._jobs.popleft()
        for node in job.nodes:
            node.job = None
            if job.error is not None:
                self._forget_host_pages(node)
                if not len(node.value) and node.parent is not None:  # it has left the device meanwhile
                    self._delete(node)
        self.tracer.emit(Acknowledged.of, self, job)

    def _settle(self, node: Any) -> None:
        """Acknowledge the copy of a node, and those that began before it."""
        while node.job is not None:
            self._acknowledge()

    # --- evict --------------------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Free slots of unlocked nodes without a child on the device, the smallest rank first. A node that the host has
        stays in the tree; with `write_back` it is written to the host now."""
        freed = 0
        slots: list[Slots] = []
        nodes: list[Any] = []
        while freed < num_tokens and (node := self._candidates.pop()) is not None:
            self._settle(node)
            if self.write_policy == "write_back" and not node.is_backed:
                self._write([node], rids)
            freed += node.num_tokens
            slots.append(node.value)
            nodes.append(node)
            self._take_off_device(node)
        if not nodes:
            return 0
        for node in nodes:  # the slots that a write reads are free from now on
            self._settle(node)
        kept = [(node.id, node.num_tokens) for node in nodes if node.parent is not None]
        gone = [(node.id, node.num_tokens) for node in nodes if node.parent is None]
        if lost := [(node.id, node.num_tokens) for node in self._lost if node not in nodes]:
            self.tracer.emit(HostEvicted.of, self, 0, rids, lost)
        self._lost = []
        if kept:
            self.tracer.emit(Demoted.of, self, num_tokens, rids, kept)
        return self._evicted(num_tokens, rids, np.concatenate(slots), gone, freed)

    def _take_off_device(self, node: Any) -> None:
        """Remove a node's KV from the device; delete it if the host does not have it."""
        parent, node.value = node.parent, NO_SLOTS
        parent.num_on_device -= 1
        if node.is_backed:
            self._push_host(node)
        else:
            self._delete(node)
        if parent is not self.root and not parent.lock_ref and self._is_leaf(parent):
            self._candidates.push(parent)

    def _delete(self, node: Any) -> None:
        """Delete a node without KV on the device, and all below it, which are lost although the host had them."""
        parent, stack = node.parent, [node]
        del parent.children[node.edge]
        self._push_host(parent)
        while stack:
            gone = stack.pop()
            gone.parent = None
            self._settle(gone)
            stack += gone.children.values()
            if gone.entry is not None:
                self._host_candidates.discard(gone)
            self._forget_host_pages(gone)
            if gone is not node:
                self._lost.append(gone)

    def evict_host(self, num_pages: int, rids: Sequence[str | None] = ()) -> int:
        """Free host pages of leaves that are on the host only, the smallest rank first. Return the number of pages."""
        freed = 0
        nodes = []
        while freed < num_pages and (node := self._host_candidates.pop()) is not None:
            freed += len(node.host_pages)
            nodes.append((node.id, node.num_tokens))
            self._delete(node)
        if nodes:
            self.tracer.emit(HostEvicted.of, self, num_pages, rids, nodes)
        return freed

    def _forget_host_pages(self, node: Any) -> None:
        self.host.free(node.host_pages)
        node.host_pages = NO_SLOTS

    def _push_host(self, node: Any) -> None:
        """Make a node a candidate of the host, if it is one."""
        if node is not self.root and not len(node.value) and not node.children and not node.host_ref:
            self._host_candidates.push(node)

    def _pin(self, node: Any, delta: int) -> None:
        """Protect a node's host pages, or no longer."""
        node.host_ref += delta
        assert node.host_ref >= 0, f"{node!r} has no such use"
        if node.host_ref and node.entry is not None and not len(node.value):
            self._host_candidates.discard(node)
        self._push_host(node)

    def _is_leaf(self, node: Any) -> bool:
        return not node.num_on_device

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        evictable = protected = 0
        pages, host_pages, num_candidates = [NO_SLOTS], [NO_SLOTS], [0, 0]
        for node in self.nodes():
            self._check_node(node)
            size, is_on_device = len(node.value), len(node.value) > 0
            evictable, protected = evictable + (not node.lock_ref) * size, protected + (node.lock_ref > 0) * size
            num_candidates[is_on_device] += node.entry is not None
            pages.append(self._pages(node.value))
            host_pages.append(node.host_pages)
        assert (evictable, protected) == (self._evictable, self._protected), "the sizes were counted wrongly"
        assert num_candidates == [len(self._host_candidates), len(self._candidates)], "the candidates were miscounted"
        self._check_pages(np.concatenate(pages))
        on_host = np.concatenate(host_pages)
        assert len(np.unique(on_host)) == len(on_host), "a page of host memory has two nodes"
        used = len(on_host) + self._num_arriving()
        assert used + self.host.available() == self.host.num_pages, "pages of host memory were lost"
        jobs = {id(node.job) for node in self.nodes() if node.job is not None}
        assert jobs <= {id(job) for job in self._jobs}, "a node has a copy that is acknowledged"

    def _num_arriving(self) -> int:
        """Return the number of host pages that are filled for nodes to come."""
        return 0

    def _check_node(self, node: Any) -> None:
        node.check(self.page_size)
