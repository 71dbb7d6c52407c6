"""Memory that two engines of one process share: a transport for tests and lessons.

Frames, names and errors are as between two processes (`shared_memory.py`), but a segment is a tensor in a table. Both
ends have the same `InProcessSegments`. New in this milestone. SGLang:
`disaggregation/fake/conn.py`, which moves nothing.
"""

from itertools import count

import torch
from torch import Tensor

from m1_single_request.errors import shown
from m6_multimodal_pd.errors import TransferError


class InProcessSegments:
    """The `Segments` of engines in one process."""

    def __init__(self) -> None:
        self._linked: dict[str, Tensor] = {}
        self._numbers = count()

    def create(self, num_bytes: int) -> tuple[str, Tensor]:
        """Return a new tensor, and its name in the table."""
        name = f"segment-{next(self._numbers)}"
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:  # out of memory; a number too large for C
            raise TransferError(f"{num_bytes:,} bytes for KV on its way cannot be had: {error}") from error
        self._linked[name] = memory
        return name, memory

    def open(self, name: str, num_bytes: int) -> Tensor:
        """Return the tensor of that name and size."""
        memory = self._linked.get(name)
        if memory is None or memory.nbytes != num_bytes:
            raise TransferError(f"there is no segment {shown(name)} of {num_bytes:,} bytes")
        return memory

    def unlink(self, name: str) -> None:
        self._linked.pop(name, None)

    def on_device(self, device: torch.device) -> None:
        """Return None: engines of one process share host memory only, since CUDA opens no handle of its own process."""
