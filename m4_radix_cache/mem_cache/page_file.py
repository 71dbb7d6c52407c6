"""The file of a page of KV on a disk: a safetensors file, of which a reader knows all bytes but the checksum.

    8 bytes: length of the header
    header (JSON): name, type and shape of each buffer; digest of the page, sha256 of the data
    data: the buffers, one after the other

So a reader parses nothing: it compares. A bit flipped anywhere, a file of another length, or one with another page's
name is found. Any tool reads the format. New in this milestone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m1_single_request.errors import ConfigError
from m1_single_request.trace_event import size
from m4_radix_cache.mem_cache.disk_files import Damage

FORMAT = "stepwise-kv-1"
"""Another format, or another meaning of the numbers in the KV, needs another name here."""
DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
"""Types of numbers: the name in torch, the name in safetensors, and the bytes per number."""

Bytes = NDArray[np.uint8]


class BufferSpec(NamedTuple):
    """Type and shape of one buffer of a page."""

    dtype: str
    """A key of `DTYPES`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return DTYPES[self.dtype][1] * prod(self.shape)


class PageFile:
    """The contents of the files of pages with these buffers."""

    def __init__(self, layout: Mapping[str, BufferSpec]) -> None:
        """`layout`: the buffers of a page, by name."""
        self.layout = dict(layout)
        self.sizes = [buffer.num_bytes for buffer in layout.values()]
        ends = np.cumsum([0, *self.sizes]).tolist()
        self._tensors = {
            name: {"dtype": DTYPES[buffer.dtype][0], "shape": buffer.shape, "data_offsets": ends[i : i + 2]}
            for i, (name, buffer) in enumerate(layout.items())
        }
        self._data_start = len(self._header(bytes(32), bytes(32)))
        self.num_bytes = self._data_start + ends[-1]
        """Size of a file."""

    def check_capacity(self, max_bytes: int) -> None:
        """Raise `ConfigError` if one page exceeds the capacity of a directory."""
        if max_bytes < self.num_bytes:
            raise ConfigError(f"disk_bytes={max_bytes} is less than one page, which takes {size(self.num_bytes)}")

    def chunks(self, digest: bytes, buffers: Sequence[Bytes]) -> list[Any]:
        """Return what the file of a page consists of, in order."""
        checksum, contiguous = sha256(), [buffer.ravel() for buffer in buffers]
        for buffer in contiguous:
            checksum.update(buffer.data)
        return [self._header(digest, checksum.digest()), *contiguous]

    def buffers(self, digest: bytes, content: bytes) -> Iterator[Bytes]:
        """Yield the bytes of each buffer. Raises `Damage` unless this is the content that was written for the page."""
        if len(content) != self.num_bytes:
            raise Damage(f"its length is not {self.num_bytes:,} bytes")
        checksum = sha256(memoryview(content)[self._data_start :]).digest()
        if not content.startswith(self._header(digest, checksum)):
            raise Damage("its header does not match its name, its layout and its data")
        start = self._data_start
        for num_bytes in self.sizes:
            yield np.frombuffer(content, np.uint8, num_bytes, start)
            start += num_bytes

    def _header(self, digest: bytes, checksum: bytes) -> bytes:
        """Return the bytes before the data; as many for every page."""
        metadata = {"format": FORMAT, "page": digest.hex(), "sha256": checksum.hex()}
        text = json.dumps({"__metadata__": metadata, **self._tensors}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
