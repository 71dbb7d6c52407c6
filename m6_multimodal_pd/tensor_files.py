"""Tensor files: read single tensors of safetensors files into memory of their own.

A loader maps the files into memory, which is the shortest way. But a file that is cut off, or a disk that fails, while
a mapped file is read ends the process, and here the process serves: so these reads raise an error. New in this
milestone. The format: 8 bytes with the length of the header, the header in JSON, then the tensors.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from m3_paged_attention.models.weights import Header, Place

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFiles:
    """The tensors of some files, by name. At most one is in memory, until its copy is done."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        """Find the tensors in the files; their types are those of `DTYPES`. Raises `OSError`, also if a file has other
        `headers` by now."""
        self.headers = headers
        self._states = {file: _state_of(file) for file in {header.file for header in headers.values()}}
        stored = [each for file in self._states for each in _stored(file)]
        self._starts = {name: start for name, _, start in stored}
        if not headers.items() <= {(name, header) for name, header, _ in stored}:
            raise OSError("a file was changed while it was read")

    def copy(self, name: str, target: Place) -> None:
        """Copy a tensor to `target`, with conversion to its type or quantization.

        Raises `OSError` if it cannot be read whole.
        """
        header, start = self.headers[name], self._starts[name]
        dtype = DTYPES[header.dtype]
        num_bytes = math.prod(header.shape) * dtype.itemsize
        read = np.fromfile(header.file, dtype=np.uint8, count=num_bytes, offset=start)
        if len(read) < num_bytes:
            raise OSError(f"{header.file.name} ends in {name}")
        target.copy_(torch.from_numpy(read).view(dtype).view(header.shape))

    def check_unchanged(self) -> None:
        """Raise `OSError` if a file was written to since the tensors were found."""
        for file, state in self._states.items():
            if _state_of(file) != state:
                raise OSError(f"{file.name} was changed while it was read")


def _state_of(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _stored(file: Path) -> list[tuple[str, Header, int]]:
    """Return name and header of every tensor in a file, and its position, in bytes."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return [
        (name, Header(file, tuple(each["shape"]), each["dtype"]), 8 + length + each["data_offsets"][0])
        for name, each in header.items()
    ]
