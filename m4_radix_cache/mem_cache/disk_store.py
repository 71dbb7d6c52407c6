"""Disk tier of the prefix cache: one file per page of KV, in a directory that outlives the process.

The name of a page is a digest of all that its KV depends on: the models, the layout of its buffers, the page size, the
namespace, and all tokens from the first to its last, chained as in `block_hash_cache.py`. So a file with this name
holds this KV, for every engine and for the next process, and a page is not written twice. A file that is not the one
that was written (`page_file.py`) is a miss, and is removed. New in this milestone. SGLang: `HiCacheStorage` in
`mem_cache/hicache_storage.py`; vLLM: `v1/kv_offload`.
"""

import json
import os
import re
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from m4_radix_cache.mem_cache.disk_files import (
    Damage,
    is_temporary,
    private_directory,
    read_file,
    reason_of,
    remove_abandoned,
    write_file,
)
from m4_radix_cache.mem_cache.page_file import FORMAT, BufferSpec, Bytes, PageFile
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES

PAGE_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
RECOUNT_SHARE, SPARE_SHARE = 16, 8
"""An engine counts the files again after it has written this part of the capacity, so that several engines exceed it by
at most this part each. If it is exceeded, this larger part is evicted, so that not every write has to."""
TOUCH_STEP_NS = 1000


class DiskResult(NamedTuple):
    """Result of a read or a write. Nothing that happens to a file raises an error."""

    status: Literal["hit", "miss", "damaged", "written", "present", "failed"]
    """Read: `hit`, `miss`, `damaged` (and removed) or `failed`. Write: `written`, `present` (as before) or `failed`."""
    reason: str = ""
    """Reason of `damaged` and `failed`, for the trace."""


class DiskStore:
    """Pages of KV in a directory. Any thread may call any method; any number of processes may share the directory."""

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int,
        layout: Mapping[str, BufferSpec],
        models: Sequence[str],
        page_size: int,
        vocab_size: int,
    ) -> None:
        """Create the directory if it is missing, remove what killed processes left, and evict what is too much.

        `max_bytes`: capacity of the directory, for the pages of all models. `layout`: the buffers of a page, by name.
        `models`: the identity of each model whose KV is in a page (`model_identity`). `page_size`: in tokens.
        `vocab_size`: larger ids stand for images, and mean something in this process only. Raises `ConfigError`.
        """
        self._file = PageFile(layout)
        self.file_bytes = self._file.num_bytes
        """Size of the file of a page."""
        self._file.check_capacity(max_bytes)
        self.path = private_directory(path)
        self.max_bytes, self._page_key_bytes, self._vocab_size = max_bytes, page_size * TOKEN_BYTES, vocab_size
        description = json.dumps([FORMAT, list(models), page_size, list(layout.items())])
        self._description = sha256(description.encode()).digest()
        self.num_ended = 0
        """Calls of the system that have ended: it grows while the disk works."""
        self._lock = threading.Lock()  # for the counts
        self._used, self._written = 0, max_bytes  # bytes in the directory; bytes written since they were counted
        with suppress(OSError):
            self._make_room(0)

    # --- names --------------------------------------------------------------------------------------------------------

    def root(self, extra_key: str | None) -> bytes:
        """Return the digest that the first page of a namespace is chained to."""
        salt = b"-" if extra_key is None else b"+" + extra_key.encode("utf-8", "surrogatepass")
        return sha256(self._description + salt).digest()

    def digests(self, parent: bytes, data: bytes) -> list[bytes]:
        """Return the digests of the pages of `data`, token ids as in `RadixKey.data`, after the page `parent`.

        They end before the first page with an image: its number in the key is assigned by this process.
        """
        images = np.flatnonzero(np.frombuffer(data, dtype="<i4") >= self._vocab_size)
        end = images[0] * TOKEN_BYTES if len(images) else len(data)
        digests = []
        for start in range(0, end - self._page_key_bytes + 1, self._page_key_bytes):
            parent = sha256(parent + data[start : start + self._page_key_bytes]).digest()
            digests.append(parent)
        return digests

    # --- pages --------------------------------------------------------------------------------------------------------

    def contains(self, digest: bytes) -> bool:
        """Return whether there is a file of this page. It may be damaged, and another process may remove it."""
        try:
            status = os.lstat(self._path_of(digest))
        except OSError:
            return False
        finally:
            self.num_ended += 1
        return stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes

    def read(self, digest: bytes, out: Sequence[Bytes]) -> DiskResult:
        """Fill the buffers of `out`, in the order of the layout, if it is a `hit`; else they stay as they are."""
        assert [buffer.nbytes for buffer in out] == self._file.sizes, "buffers of another layout"
        path = self._path_of(digest)
        try:
            found = list(self._file.buffers(digest, read_file(path, self.file_bytes + 1)))
        except (FileNotFoundError, NotADirectoryError):
            return DiskResult("miss")
        except OSError as error:
            return DiskResult("failed", reason_of(error))
        except Damage as damage:
            with suppress(OSError):
                os.unlink(path)
            return DiskResult("damaged", str(damage))
        finally:
            self.num_ended += 1
        for buffer, content in zip(out, found, strict=True):
            buffer[...] = content.reshape(buffer.shape)
        return DiskResult("hit")

    def write(self, digest: bytes, buffers: Sequence[Bytes]) -> DiskResult:
        """Write a page, in the order of the layout. Evicts the least recently used pages if the capacity needs it."""
        assert [buffer.nbytes for buffer in buffers] == self._file.sizes, "buffers of another layout"
        if self.contains(digest):
            return DiskResult("present")
        chunks = self._file.chunks(digest, buffers)
        try:
            if not self._make_room(self.file_bytes):
                return DiskResult("failed", "the capacity is used by files that cannot be removed")
            write_file(self.path, _name_of(digest), chunks)
        except OSError as error:
            return DiskResult("failed", reason_of(error))
        finally:
            self.num_ended += 1
        with self._lock:
            self._used += self.file_bytes
        return DiskResult("written")

    def touch(self, digests: Sequence[bytes]) -> None:
        """Make the pages of a chain, from its first page on, the most recently used of all processes.

        The first page becomes the most recent one: without it, the others cannot be found. The file system keeps this
        time, as the time of the last change.
        """
        now = time.time_ns()
        for digest in digests:
            with suppress(OSError):
                os.utime(self._path_of(digest), ns=(now, now), follow_symlinks=False)
            now -= TOUCH_STEP_NS

    def clear(self) -> None:
        """Remove the pages of all models. Other files stay. Raises `OSError` if a page cannot be removed."""
        error = None
        with self._lock, suppress(FileNotFoundError, NotADirectoryError):  # there are none then
            error = self._evict(self._count(), 0)
        if error is not None:
            raise error

    @property
    def used_bytes(self) -> int:
        """Size of all pages in the directory, as of the last count, and those that were written since."""
        return self._used

    # --- files --------------------------------------------------------------------------------------------------------

    def _path_of(self, digest: bytes) -> str:
        return os.path.join(self.path, _name_of(digest))

    def _make_room(self, num_bytes: int) -> bool:
        """Evict pages if bytes that are to be written need it. Returns False if they do not fit."""
        with self._lock:
            self._written += num_bytes
            exceeded = self._used + num_bytes > self.max_bytes
            if exceeded or self._written > self.max_bytes // RECOUNT_SHARE:
                pages = self._count()
                if self._used + num_bytes > self.max_bytes:
                    spare = self.max_bytes // SPARE_SHARE
                    self._evict(pages, max(0, self.max_bytes - max(spare, num_bytes)))
            return self._used + num_bytes <= self.max_bytes

    def _count(self) -> list[tuple[int, str, int]]:
        """Return time of last use, name and size of every page, and remove temporary files of killed processes."""
        pages = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                self.num_ended += 1
                if PAGE_NAME.fullmatch(entry.name):
                    with suppress(OSError):  # removed by another process
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            pages.append((status.st_mtime_ns, entry.name, status.st_size))
                elif is_temporary(entry.name):
                    remove_abandoned(entry.path)
        self._used, self._written = sum(num_bytes for _, _, num_bytes in pages), 0
        return pages

    def _evict(self, pages: list[tuple[int, str, int]], max_used: int) -> OSError | None:
        """Remove the least recently used pages until at most `max_used` bytes are in use. Return the first error."""
        failure: OSError | None = None
        for _, name, num_bytes in sorted(pages):
            if self._used <= max_used:
                break
            try:
                os.unlink(os.path.join(self.path, name))
            except FileNotFoundError:  # another process has evicted it
                pass
            except OSError as error:
                failure = failure or error
                continue
            finally:
                self.num_ended += 1
            self._used -= num_bytes
        return failure


def _name_of(digest: bytes) -> str:
    return f"{digest.hex()}.safetensors"
