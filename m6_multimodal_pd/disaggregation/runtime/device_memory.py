"""GPU memory that two processes of one host share, and host memory that a GPU copies to and from by itself.

A prefill engine makes a segment on its GPU; a decode engine opens it with a handle of CUDA (IPC) and reads it from its
own GPU, over NVLink or PCIe, if that is the same one or can access the other. GPUs are compared by UUID: their numbers
differ where processes see different GPUs (`CUDA_VISIBLE_DEVICES`). As in `shared_memory.py` it is the transport's
memory that is shared and never the KV memory. torch counts the processes that have such memory open, and keeps it until
the count is 0; for a process that was killed, or could not open it, until the owner ends. New in this milestone. vLLM:
`CudaRTLibrary` in `distributed/device_communicators/cuda_wrapper.py`, for its own all-reduce; torch:
`multiprocessing/reductions.py`.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import shown
from m1_single_request.trace_event import size
from m6_multimodal_pd.disaggregation.runtime.messages import DeviceSegment
from m6_multimodal_pd.errors import TransferError

READ_ONLY = 8
"""`cudaHostRegisterReadOnly`: memory that this process has mapped for reading only."""


class DeviceSegments:
    """The segments of an engine in GPU memory: those that it makes, and those that it opens."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        others = [
            number
            for number in range(torch.cuda.device_count())
            if number != device.index and torch.cuda.can_device_access_peer(device.index, number)
        ]
        self.readable = tuple(map(_uuid, [device.index, *others]))
        """UUIDs of the GPUs whose memory this engine can read, its own first."""

    def create(self, num_bytes: int) -> tuple[DeviceSegment, Tensor]:
        """Return new memory, uint8 `[num_bytes]`, and its description for one other process. Raises `TransferError` if
        there is none, or if memory of torch's allocator cannot be shared (as with `expandable_segments`)."""
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            storage: Any = memory.untyped_storage()
            _, handle, _, offset, counter, counter_offset, _, _ = storage._share_cuda_()
        except RuntimeError as error:
            raise TransferError(f"{size(num_bytes)} of GPU memory cannot be shared: {error}") from error
        return DeviceSegment(self.readable[0], num_bytes, handle, offset, counter.decode(), counter_offset), memory

    def open(self, segment: DeviceSegment, num_bytes: int) -> Tensor:
        """Return the memory that another process describes, uint8 `[num_bytes]`, to be read by kernels and copies of
        this GPU. Raises `TransferError` for another size, a GPU that cannot be read, and what CUDA does not open."""
        if segment.num_bytes != num_bytes:
            raise TransferError(f"a segment of {segment.num_bytes:,} bytes of GPU memory, not {num_bytes:,}")
        if segment.device not in self.readable:
            raise TransferError(f"GPU {shown(segment.device)} cannot be read from {self.device}")
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        counter = segment.counter.encode(), segment.counter_offset
        no_event = b"", False  # what the memory holds is known to be complete by the messages about it
        place = self.device.index, segment.handle, num_bytes, segment.offset
        try:
            return memory.set_(torch.UntypedStorage._new_shared_cuda(*place, *counter, *no_event))
        except RuntimeError as error:
            raise TransferError(f"GPU memory of another process cannot be opened: {error}") from error


def _uuid(number: int) -> str:
    properties: Any = torch.cuda.get_device_properties(number)
    return str(properties.uuid)


def nothing() -> None:
    """Unlock memory that is not page-locked."""


def page_lock(memory: Tensor, device: torch.device, *, is_read_only: bool = False) -> tuple[Callable[[], object], str]:
    """Page-lock host memory if `device` is a GPU, so that copies between the two do not wait.

    Return the function that unlocks it, to be called before it is unmapped; and an error message, if CUDA refuses, or
    an empty text. Without it copies are slower.
    """
    if device.type == "cpu" or memory.is_pinned():  # as the other end has done it, in this process
        return nothing, ""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, READ_ONLY if is_read_only else 0))
        if code != 0:
            with suppress(RuntimeError):  # CUDA keeps the error, and the next launch would report it as its own
                torch.zeros(1, device=device)
            return nothing, f"{size(memory.nbytes)} of it cannot be page-locked (CUDA error {code}), so copies wait"
    address = memory.data_ptr()

    def unlock() -> None:
        with suppress(torch.AcceleratorError):  # a lost device copies nothing any more
            torch.cuda.synchronize(device)  # in one process, the other end copies on a stream of its own
        cudart.cudaHostUnregister(address)

    return unlock, ""
