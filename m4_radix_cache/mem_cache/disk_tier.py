"""The disk tier at work: a thread that writes pages, one that reads them before their request starts, and one that
looks whether there are any.

Pages are written from host memory when they have arrived there, and read to host memory, beside the steps. What is
read or written is held there (`HostKVPool.hold`), whatever the tree does with it meanwhile. New in this milestone.
SGLang: `HiCacheController.prefetch_thread_func` and `backup_thread_func`.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from m4_radix_cache.errors import DiskError
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.disk_files import reason_of
from m4_radix_cache.mem_cache.disk_store import DiskResult, DiskStore
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.radix_key import RadixKey

HANG_S = 5.0
"""A disk that ends no read or write between two looks this far apart hangs: nobody waits for it any longer."""
LOOK_S = 0.1
"""Time that a request waits for the answer whether the disk has its first page."""
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
        """Return whether nobody waits for it any longer; with `best_effort` nobody does, and it goes on."""
        limit_s = BASE_S + len(self.digests) * page_size * S_PER_TOKEN
        is_late = self.policy == "timeout" and self.seconds > limit_s
        return self.has_ended.is_set() or is_late

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


class DiskThread:
    """A thread that makes calls of the disk, one after the other. One that hangs ends with the process."""

    def __init__(self, name: str) -> None:
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_make_all, args=(self.calls,), name=f"kv-disk-{name}", daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call; return its result to come."""
        future: Future[Any] = Future()
        self.calls.put((future, call))
        return future


def _make_all(calls: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
        del item, future, call  # while the thread waits for the next


class DiskTier:
    """The pages of a host pool in a directory. Its threads end with it."""

    def __init__(self, store: DiskStore, host: HostKVPool) -> None:
        self.store, self.host = store, host
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._writer, self._reader, self._finder = threads = [DiskThread(name) for name in ("write", "read", "look")]
        self._stop = weakref.finalize(self, _stop, [thread.calls for thread in threads])
        self._looks: Future[bool] | None = None

    def write(self, digests: Sequence[bytes], pages: Slots, chain: Sequence[bytes]) -> None:
        """Begin to write pages of host memory. `chain`: the names of all pages down to the last of these."""
        self.host.hold(pages)
        arguments = (self.store, self.host, self._failures, digests, pages.tolist(), chain)
        self._writer.submit(partial(_write, *arguments))

    def contains(self, digest: bytes) -> bool:
        """Return whether the disk has a page. A disk that does not answer has none, until it does."""
        if self._looks is not None and not self._looks.done():
            return False
        self._looks = self._finder.submit(partial(self.store.contains, digest))
        return self._looks in wait([self._looks], LOOK_S).done and self._looks.result()

    def prefetch(self, prefetch: Prefetch) -> None:
        """Begin to read pages."""
        self.host.hold(prefetch.pages)
        self._reader.submit(partial(prefetch.read, self.store, self.host))

    def clear(self) -> None:
        """Remove all pages, also those that are to be written. Raises `DiskError` if some may be left."""
        cleared = self._writer.submit(self.store.clear)
        if not self._wait([cleared]):
            done = "not flushed" if cleared.cancel() else "flushed in part"
            raise DiskError(f"the disk with {self.store.path} hangs: it is {done}")
        try:
            cleared.result()
        except OSError as error:
            raise DiskError(f"pages in {self.store.path} cannot be removed: {reason_of(error)}") from error

    def failures(self) -> list[str]:
        """Return the reasons of writes that have failed since the last call."""
        found = []
        while not self._failures.empty():
            found.append(self._failures.get())
        return found

    def close(self) -> None:
        """Write what is to be written, and end the threads."""
        threads = (self._writer, self._reader, self._finder)
        last = [thread.submit(_nothing) for thread in threads]
        self._stop()
        if self._wait(last):
            for thread in threads:
                thread.thread.join()

    def _wait(self, calls: Sequence[Future[Any]]) -> bool:
        """Wait until calls have ended, as long as the disk works; return whether they have."""
        before = -1
        while wait(calls, HANG_S).not_done:
            if before == self.store.num_ended:
                return False
            before = self.store.num_ended
        return True


def _nothing() -> None:
    """The last call of a thread."""


def _stop(all_calls: Sequence[Any]) -> None:
    for calls in all_calls:
        calls.put(None)


def _write(
    store: DiskStore,
    host: HostKVPool,
    failures: "queue.SimpleQueue[str]",
    digests: Sequence[bytes],
    pages: list[int],
    chain: Sequence[bytes],
) -> None:
    for digest, page in zip(digests, pages, strict=True):
        try:
            result = store.write(digest, host.buffers(page))
        except Exception as error:
            result = DiskResult("failed", reason_of(error))
        if result.status == "failed":
            failures.put(result.reason)
        host.release(page)
    store.touch(chain)
