"""A device whose copies come late, and GPUs whose memory others can read: both on a CPU, the same in every run.

A late copy takes place when it was asked for often enough, and until then its target holds nothing but 0xFF (as floats:
NaN). Whoever reads too early reads that. What it reads, it reads last: whoever overwrites a frame too early spoils it.
"""

import sys
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from m6_multimodal_pd.disaggregation import engine
from m6_multimodal_pd.disaggregation.page_store import Copy, PageStore
from m6_multimodal_pd.disaggregation.runtime import assembly
from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.messages import DeviceSegment
from m6_multimodal_pd.errors import TransferError

POISON = 0xFF
NEVER = 10**9
MAY_WAIT = ("forget", "close")
"""Nobody else may wait for a copy: the event loop would stand still."""


class LateCopy(Copy):
    """A copy of a stream: behind the ones before it, and done after so many questions."""

    def __init__(self, stream: list["LateCopy"], source: Tensor, target: Tensor, num_polls: int) -> None:
        super().__init__(target)
        self.source, self.num_polls, self.has_come = source, num_polls, False
        target.fill_(POISON)
        self.before = [copy for copy in stream if not copy.has_come]
        stream.append(self)

    def is_done(self) -> bool:
        self.num_polls -= 1
        if self.num_polls < 0 and all(copy.has_come for copy in self.before):
            self.come()
        return self.has_come

    def come(self) -> None:
        if not self.has_come:
            self.rows.copy_(self.source)
            self.has_come = True

    def overlaps(self, rows: Tensor) -> bool:
        """Whether this copy still reads or writes some of these bytes."""
        begin, end = rows.data_ptr(), rows.data_ptr() + rows.nbytes
        own = (self.source, self.rows)
        return not self.has_come and any(begin < own.data_ptr() + own.nbytes and own.data_ptr() < end for own in own)


class LateStore(PageStore):
    """KV memory whose copies come late. Pages themselves are read and written in the order of steps, as on a GPU."""

    rng = Random(0)
    most_polls = 5
    everywhere: ClassVar[list[LateCopy]] = []
    """The copies of all stores of a test."""

    def __init__(self, storages: Any) -> None:
        super().__init__(storages)
        self.stream: list[LateCopy] = []

    def read(self, pages: Any, rows: Tensor) -> Copy:
        here = torch.empty_like(rows)
        super().read(pages, here)
        return self._late(here, rows)

    def fetch(self, rows: Tensor) -> Copy:
        return self._late(rows, torch.empty_like(rows))

    def write(self, pages: Any, rows: Tensor) -> None:
        assert not any(copy.overlaps(rows) for copy in self.stream), "what is written has not come"
        super().write(pages, rows)

    def wait(self) -> None:
        assert sys._getframe(1).f_code.co_name in MAY_WAIT, "the event loop waits for a copy"
        for copy in self.stream:
            copy.come()

    def _late(self, source: Tensor, target: Tensor) -> Copy:
        assert not any(copy.overlaps(target) for copy in self.everywhere), "it is still in use by another copy"
        copy = LateCopy(self.stream, source, target, self.rng.randrange(self.most_polls + 1))
        self.everywhere.append(copy)
        return copy


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LateStore]]:
    """All engines that a test makes have late copies."""
    monkeypatch.setattr(engine, "PageStore", LateStore)
    monkeypatch.setattr(LateStore, "rng", Random(0))
    monkeypatch.setattr(LateStore, "everywhere", [])
    yield LateStore


class GPU(DeviceSegments):
    """A GPU in name only: its memory is on the host, and CUDA's handles are names in a table."""

    def __init__(self, number: int, table: dict[bytes, Tensor], readable: tuple[str, ...]) -> None:
        self.device, self.table, self.why_not = torch.device("cpu"), table, ""
        self.readable = (f"GPU-{number}", *readable)
        self.opened: list[DeviceSegment] = []

    def create(self, num_bytes: int) -> tuple[DeviceSegment, Tensor]:
        if self.why_not:
            raise TransferError(self.why_not)
        handle = f"handle-{len(self.table)}".encode()
        shared = (0, handle, num_bytes, 512, b"/torch_1_2_3", 7, bytes(64), True)
        with patch.object(torch.UntypedStorage, "_share_cuda_", lambda storage: shared, create=True):
            description, memory = super().create(num_bytes)
        self.table[handle] = memory.fill_(POISON)
        return description, memory

    def open(self, segment: DeviceSegment, num_bytes: int) -> Tensor:
        if self.why_not:
            raise TransferError(self.why_not)

        def opened(device: Any, handle: bytes, *rest: Any) -> Any:
            if handle not in self.table:
                raise RuntimeError("CUDA error: invalid device context")
            return self.table[handle].untyped_storage()

        with patch.object(torch.UntypedStorage, "_new_shared_cuda", opened, create=True):
            memory = super().open(segment, num_bytes)
        self.opened.append(segment)
        return memory


class GPUSegments(InProcessSegments):
    """Segments of engines that each have a GPU of their own."""

    readable: tuple[str, ...] = tuple(f"GPU-{number}" for number in range(9))
    """GPUs that all of them can read."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[bytes, Tensor] = {}
        self.numbers = count()

    def on_device(self, device: torch.device) -> Any:
        return GPU(next(self.numbers), self.table, self.readable)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GPUSegments]]:
    """All engines that a test makes have GPUs in name."""
    monkeypatch.setattr(assembly, "InProcessSegments", GPUSegments)
    yield GPUSegments
