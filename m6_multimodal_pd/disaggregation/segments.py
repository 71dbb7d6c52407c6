"""Segments: memory that two engines map, through which pages of KV go from one to the other (`staging.py`).

Engines of two processes share a file in memory (`runtime/shared_memory.py`), those of one process a tensor
(`runtime/in_process.py`). If the decode engine can read the GPU of the prefill engine, the segment is there
(`runtime/device_memory.py`).
"""

from typing import Protocol

import torch
from torch import Tensor

from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments


class Segments(Protocol):
    """Memory that two engines map. A segment lives as long as a tensor of it does, on either side."""

    def create(self, num_bytes: int) -> tuple[str, Tensor]:
        """Return new memory, uint8 `[num_bytes]`, and the name that opens it. Raises `TransferError`."""
        ...

    def open(self, name: str, num_bytes: int) -> Tensor:
        """Return the memory of that name and exactly that size, to be read. Raises `TransferError` for other names."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name, so that the memory cannot be opened again. No effect for a name that is removed."""
        ...

    def on_device(self, device: torch.device) -> DeviceSegments | None:
        """Return the segments in the memory of a GPU; None if the two engines can share none there."""
        ...
