"""The tree with a third tier: pages on a disk, which outlive the process.

A node that host memory has is written to the disk, page by page. When a request arrives and the disk may have what the
tree does not, its pages are read to host memory before the request starts: until then the scheduler passes it over
(`is_waiting`). What had arrived when a step began is used; so the tokens of a request never depend on the disk, and the
step in which it starts may. SGLang: `prefetch_from_storage` and `check_prefetch_progress` in `hiradix_cache.py`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS
from m4_radix_cache.mem_cache.disk_events import DiskFailed, DiskWriteStarted, Prefetched, PrefetchStarted
from m4_radix_cache.mem_cache.disk_tier import DiskTier, Prefetch
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_copies import CopyJob
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.mem_cache.tree_node import Edge
from m4_radix_cache.request import Req

HOST_SHARE = 2
"""All prefetches together take at most this part of host memory: a half."""
WAIT_S = 0.01
"""Time that a step waits for the disk if nothing else can run."""


class DiskRadixCache(HiRadixCache):
    """The tree over three tiers. `_acknowledge` also writes, `begin_step` also takes what has arrived."""

    prefetch_class: ClassVar[type[Prefetch]] = Prefetch
    least_prefetched: ClassVar[int] = 256
    """Fewer tokens are computed, which is as fast as to wait for the disk."""

    def __init__(self, *, open_disk: Callable[[str | None], DiskTier], prefetch_policy: str, **parts: Any) -> None:
        """`open_disk`: returns the disk tier for the weights of a model, None for those that are loaded.
        `prefetch_policy`: as in `CacheConfig`. `parts`: as of the tree with two tiers."""
        self.open_disk, self.prefetch_policy = open_disk, prefetch_policy
        self.disk = self.open_disk(None)
        self._last_failure: str | None = None  # a full disk is reported once
        super().__init__(**parts)

    def _start_empty(self) -> None:
        self._arrived: dict[str, Req] = {}  # since the last step
        self._prefetches: dict[str, Prefetch] = {}
        super()._start_empty()

    def reset(self) -> None:
        """Discard what device and host have. The disk keeps its pages."""
        for rid in list(self._prefetches):
            self.cancel_prefetch(rid)
        super().reset()

    def flush_tier(self, tier: str) -> None:
        if tier != "disk":
            return super().flush_tier(tier)
        while self._jobs:
            self._acknowledge()
        for node in self.nodes():
            node.is_on_disk = False
        self.disk.clear()

    def tier_bytes(self) -> dict[str, int]:
        return super().tier_bytes() | {"disk_bytes": self.disk.store.used_bytes}

    def close(self) -> None:
        """Write what is to be written."""
        self._end_copies()
        self.disk.close()
        vars(self).pop("open_disk", None)  # it has the models

    # --- write --------------------------------------------------------------------------------------------------------

    def _acknowledge(self) -> None:
        job = self._jobs[0]
        super()._acknowledge()
        if job.kind == "write" and job.error is None:
            for node in job.nodes:
                node.is_on_disk = False
            for node in job.nodes:
                if node.parent is not None:
                    self._write_to_disk(node, job)

    def _write_to_disk(self, last: Any, job: CopyJob) -> None:
        """Write the nodes down to `last` that the disk does not have: those of the job, and after a flush of the disk
        those above, without which it could not be found."""
        for node in self._path(last):
            if not node.is_on_disk and node.is_backed and node.job is None and (digests := self._digests(node)):
                self.disk.write(digests, node.host_pages[: len(digests)], self._chain(node))
                self.tracer.emit(DiskWriteStarted.of, job, node, len(digests) * self.page_size)
                node.is_on_disk = True

    def _digests(self, node: Any) -> list[bytes] | None:
        """Return the names of a node's pages on the disk: of all of them, or of those before the first image. None for
        the root, and below an image."""
        above: list[bytes] | None = None
        for each in self._path(node):
            if each.digests is None:
                parent = self.disk.store.root(each.edge[0]) if above is None else above[-1]
                each.digests = self.disk.store.digests(parent, each.key)
            above = each.digests
            if len(above) * self.page_key_bytes < len(each.key):
                return above if each is node else None
        return above

    def _chain(self, node: Any) -> list[bytes]:
        """Return the names of the pages from the first one of a prompt down to `node`."""
        return [digest for each in self._path(node) for digest in each.digests]

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        upper = super()._split(node, num_bytes, rid)
        upper.is_on_disk = node.is_on_disk
        if node.digests is not None:
            num_pages = num_bytes // self.page_key_bytes
            upper.digests, node.digests = node.digests[:num_pages], node.digests[num_pages:]
        return upper

    # --- prefetch -----------------------------------------------------------------------------------------------------

    def prefetch(self, req: Req) -> None:
        """Let the next step begin to read the pages of a request that has arrived."""
        self._arrived[req.rid] = req

    def _prefetch(self, req: Req) -> None:
        """Begin to read the pages of a request, if the disk has the first one that the tree lacks."""
        num_pages = req.match_limit // self.page_size
        node, _, start = self._walk(req.key, num_pages * self.page_key_bytes, 0)
        names = self._digests(node)
        if node is not self.root and len(names or ()) * self.page_key_bytes < len(node.key):  # behind an image
            return
        store, data = self.disk.store, req.key.data[start : num_pages * self.page_key_bytes]
        digests = store.digests(names[-1] if names else store.root(req.key.extra_key), data)
        if len(digests) * self.page_size < self.least_prefetched:
            return
        same = (one for one in self._prefetches.values() if one.digests == digests)
        prefetch = next(same, None)  # of another output of the same prompt, for example
        if prefetch is None:
            is_too_large = (self._num_arriving() + len(digests)) * HOST_SHARE > self.host.num_pages
            if is_too_large or not self.disk.contains(digests[0]):
                return
            self._pin(node, 1)
            pages = self._host_pages(len(digests), [req.rid])
            self._pin(node, -1)
            if pages is None:
                return
            prefetch = self.prefetch_class(
                req.key, start // TOKEN_BYTES, digests, pages, self.prefetch_policy, self._chain(node)
            )
            self.disk.prefetch(prefetch)
        self._prefetches[req.rid] = prefetch
        self.tracer.emit(PrefetchStarted, rid=req.rid, asked=len(digests) * self.page_size, policy=self.prefetch_policy)

    def _num_arriving(self) -> int:
        return sum(len(prefetch.pages) for prefetch in self._distinct())

    def _distinct(self) -> list[Prefetch]:
        """Return the prefetches, each once although several requests may wait for it."""
        return list(dict.fromkeys(self._prefetches.values()))

    def is_waiting(self, req: Req) -> bool:
        """Return whether pages of a request are still read. With `best_effort` take those that have arrived."""
        prefetch = self._prefetches.get(req.rid)
        if prefetch is not None and prefetch.policy == "best_effort":
            self._take(prefetch)
        return req.rid in self._prefetches

    def cancel_prefetch(self, rid: str) -> None:
        self._arrived.pop(rid, None)
        prefetch = self._prefetches.pop(rid, None)
        if prefetch is not None and prefetch not in self._prefetches.values():
            prefetch.is_cancelled = True
            self.host.free(prefetch.pages)

    def wait_for_disk(self) -> bool:
        """If pages are read, wait for them for a moment; return whether they are."""
        for prefetch in self._prefetches.values():
            prefetch.has_ended.wait(WAIT_S)
            return True
        return False

    def begin_step(self) -> None:
        """Also take what has arrived, for the requests that wait no longer."""
        super().begin_step()
        for reason in self.disk.failures():
            if reason != self._last_failure:
                self.tracer.emit(DiskFailed, reason=reason)
            self._last_failure = reason
        while self._arrived:
            self._prefetch(self._arrived.pop(next(iter(self._arrived))))
        for prefetch in self._distinct():
            if prefetch.is_over(self.page_size):
                self._take(prefetch)

    def _take(self, prefetch: Prefetch) -> None:
        """Insert the pages of a prefetch that have arrived, as nodes in host memory."""
        seconds, num_pages = prefetch.seconds, prefetch.num_arrived
        rids = [rid for rid, one in self._prefetches.items() if one is prefetch]
        for rid in rids:
            del self._prefetches[rid]
        prefetch.is_cancelled = True
        self.host.free(prefetch.pages[num_pages:])
        found, asked = num_pages * self.page_size, len(prefetch.pages) * self.page_size
        self.num_disk_hit_tokens += found
        node = self._insert_on_host(prefetch.key, prefetch.start, prefetch.pages[:num_pages]) if found else None
        if node is not None:
            node.is_on_disk = True
        for rid in rids:
            self.tracer.emit(Prefetched.of, rid, prefetch, node, asked, found, seconds)
            node = None  # the others find it there

    def _insert_on_host(self, key: RadixKey, start: int, pages: Slots) -> Any:
        """Cache the tokens of `key` from `start` on, with KV in these host pages. Return the new node; None if there is
        none, because the tree has them meanwhile, or has not those before them any more. Unused pages are freed."""
        end = start * TOKEN_BYTES + len(pages) * self.page_key_bytes
        parent, _, offset = self._walk(key, end, 0)
        if offset == end or offset < start * TOKEN_BYTES:
            self.host.free(pages)
            return None
        num_known = (offset - start * TOKEN_BYTES) // self.page_key_bytes
        self.host.free(pages[:num_known])
        page = key.data[offset : offset + self.page_key_bytes]
        edge: Edge = (key.extra_key, page) if parent is self.root else page
        node = self._new_node(parent, edge, key.data[offset:end], NO_SLOTS)
        node.host_pages = pages[num_known:]
        if parent.entry is not None and not len(parent.value):
            self._host_candidates.discard(parent)
        self._push_host(node)
        return node
