"""Small disk stores, and pages whose content follows from their digest. Imports no torch: `disk_process.py` uses it."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from m4_radix_cache.mem_cache.disk_files import is_temporary
from m4_radix_cache.mem_cache.disk_store import DiskResult, DiskStore
from m4_radix_cache.mem_cache.page_file import BufferSpec, Bytes

LAYOUT = {
    "k": BufferSpec("bfloat16", (2, 3, 4)),
    "v": BufferSpec("float32", (2, 3)),
    "scales": BufferSpec("int8", (5,)),
}
PAGE_SIZE, VOCAB_SIZE = 4, 1000


def make_store(path: Path | str, **changes: Any) -> DiskStore:
    """A store with room for many small pages."""
    settings = dict(max_bytes=2**30, layout=LAYOUT, models=["m"], page_size=PAGE_SIZE, vocab_size=VOCAB_SIZE)
    return DiskStore(path, **{**settings, **changes})


def tokens(number: int, first: int = 0) -> bytes:
    """Ids of so many tokens, as in a key."""
    return (np.arange(first, first + number, dtype="<i4") % VOCAB_SIZE).tobytes()


def chain(store: DiskStore, number: int, extra_key: str | None = None) -> list[bytes]:
    """Digests of so many pages, one after the other."""
    return store.digests(store.root(extra_key), tokens(number * PAGE_SIZE))


def page_of(digest: bytes, layout: dict[str, BufferSpec] = LAYOUT) -> list[Bytes]:
    """The buffers of a page; no two pages have the same."""
    return [
        np.resize(np.frombuffer(sha256(digest + name.encode()).digest(), np.uint8), buffer.num_bytes)
        for name, buffer in layout.items()
    ]


def room(layout: dict[str, BufferSpec] = LAYOUT) -> list[Bytes]:
    """Buffers for a page, with something in them."""
    return [np.full(buffer.num_bytes, 170, np.uint8) for buffer in layout.values()]


def read(store: DiskStore, digest: bytes, layout: dict[str, BufferSpec] = LAYOUT) -> DiskResult:
    """Read a page. A hit has the right bytes, anything else has left the buffers alone."""
    out = room(layout)
    result = store.read(digest, out)
    right = page_of(digest, layout) if result.status == "hit" else room(layout)
    assert all(map(np.array_equal, out, right)), f"wrong bytes: {result}"
    return result


def write(store: DiskStore, digest: bytes) -> str:
    """Write a page, and return how that went."""
    return store.write(digest, page_of(digest)).status


def fill(store: DiskStore, digests: list[bytes]) -> None:
    """Write pages, the last of them as the most recently used."""
    for digest in digests:
        assert write(store, digest) == "written"
        store.touch([digest])


def stored(store: DiskStore, digests: list[bytes]) -> list[int]:
    """Which of the pages are there, by number."""
    return [number for number, digest in enumerate(digests) if read(store, digest).status == "hit"]


def file_of(store: DiskStore, digest: bytes) -> Path:
    return Path(store.path, f"{digest.hex()}.safetensors")


def temporaries(path: Path | str) -> list[str]:
    """Files that are being written, or were."""
    return [file.name for file in Path(path).iterdir() if is_temporary(file.name)]
