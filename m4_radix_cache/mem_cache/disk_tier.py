"""The disk tier at work: a thread that writes pages, and threads that read them before their request starts.

Pages are written from host memory when they have arrived there, and read to host memory, beside the steps. What is
read or written is held there (`HostKVPool.hold`), whatever the tree does with it meanwhile. New in this milestone.
SGLang: `HiCacheController.prefetch_thread_func` and `backup_thread_func`.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from m4_radix_cache.errors import DiskError
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.disk_files import reason_of
from m4_radix_cache.mem_cache.disk_store import DiskResult, DiskStore
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_key import RadixKey

HANG_S = 5.0
"""A disk that ends no read or write between two looks this far apart hangs: nobody waits for it any longer."""
BASE_S, S_PER_TOKEN = 1.0, 0.25 / 1024
"""Time that a request waits for its pages, with the policy `timeout`."""


class Prefetch:
    """Pages of one request that are read from the disk."""

    def __init__(
        self, key: RadixKey, start: int, digests: Sequence[bytes], pages: Slots, policy: str, chain: list[bytes]
    ) -> None:
        """`start`: tokens of `key` before the first page, whose pages have the names `chain`. `pages`: in host memory,
        one for each of `digests`."""
        self.key, self.start, self.digests, self.pages = key, start, digests, pages
        self.policy, self.chain, self.began = policy, chain, time.monotonic()
        self.num_arrived = 0
        """Pages that are complete, from the first one on."""
        self.failure: str | None = None
        """Why a page is damaged or cannot be read; the last one that was tried."""
        self.is_cancelled = False
        self.has_ended = threading.Event()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def is_over(self, page_size: int) -> bool:
        """Return whether the request waits no longer for it."""
        limit_s = BASE_S + len(self.digests) * page_size * S_PER_TOKEN
        is_late = self.policy == "timeout" and self.seconds > limit_s
        return self.has_ended.is_set() or self.policy == "best_effort" or is_late

    def read(self, store: DiskStore, host: HostKVPool) -> None:
        """Read pages until one is missing; on a thread."""
        try:
            for digest, page in zip(self.digests, self.pages.tolist(), strict=True):
                if self.is_cancelled:
                    break
                result = store.read(digest, host.buffers(page))
                if result.status != "hit":
                    self.failure = result.reason or None
                    break
                self.num_arrived += 1
            store.touch([*self.chain, *self.digests[: self.num_arrived]])
        except Exception as error:  # of memory, for example; the request must not wait for ever
            self.failure = reason_of(error)
        self.has_ended.set()
        for page in self.pages.tolist():
            host.release(page)


Writes = queue.SimpleQueue[tuple[Sequence[bytes], list[int], Sequence[bytes]] | threading.Event | None]
Reads = queue.SimpleQueue[Prefetch | None]


class DiskTier:
    """The pages of a host pool in a directory. Its threads end with it."""

    def __init__(self, store: DiskStore, host: HostKVPool) -> None:
        self.store, self.host = store, host
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._writes: Writes = queue.SimpleQueue()
        self._reads: Reads = queue.SimpleQueue()
        self._stop = weakref.finalize(self, _stop, self._writes, self._reads)
        self._threads = [
            threading.Thread(target=_write_all, args=(self._writes, store, host, self._failures), daemon=True),
            threading.Thread(target=_read_all, args=(self._reads, store, host), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def write(self, digests: Sequence[bytes], pages: Slots, chain: Sequence[bytes]) -> None:
        """Begin to write pages of host memory. `chain`: the names of all pages down to the last of these."""
        self.host.hold(pages)
        self._writes.put((digests, pages.tolist(), chain))

    def prefetch(self, prefetch: Prefetch) -> None:
        """Begin to read pages."""
        self.host.hold(prefetch.pages)
        self._reads.put(prefetch)

    def clear(self) -> None:
        """Remove all pages, also those that are to be written. Raises `DiskError`, and removes none, if it hangs."""
        written = threading.Event()
        self._writes.put(written)
        if not self._wait(written.wait):
            raise DiskError(f"the disk with {self.store.path} hangs: it is not flushed")
        self.store.clear()

    def failures(self) -> list[str]:
        """Return the reasons of writes that have failed since the last call."""
        found = []
        while not self._failures.empty():
            found.append(self._failures.get())
        return found

    def close(self) -> None:
        """Write what is to be written, and end the threads; those of a disk that hangs end with the process."""
        self._stop()
        for thread in self._threads:
            self._wait(partial(_ended, thread))

    def _wait(self, wait: Callable[[float], bool]) -> bool:
        """Wait for the threads, as long as they read or write pages; return whether `wait` has ended."""
        before = -1
        while not wait(HANG_S):
            if before == self.host.num_released:
                return False
            before = self.host.num_released
        return True


def _ended(thread: threading.Thread, timeout: float) -> bool:
    """Wait until a thread has ended; return whether it has."""
    thread.join(timeout)
    return not thread.is_alive()


def _stop(writes: Writes, reads: Reads) -> None:
    writes.put(None)
    reads.put(None)


def _write_all(writes: Writes, store: DiskStore, host: HostKVPool, failures: "queue.SimpleQueue[str]") -> None:
    while (item := writes.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        digests, pages, chain = item
        for digest, page in zip(digests, pages, strict=True):
            try:
                result = store.write(digest, host.buffers(page))
            except Exception as error:
                result = DiskResult("failed", reason_of(error))
            if result.status == "failed":
                failures.put(result.reason)
            host.release(page)
        store.touch(chain)


def _read_all(reads: Reads, store: DiskStore, host: HostKVPool) -> None:
    while (prefetch := reads.get()) is not None:
        prefetch.read(store, host)
