"""One copy to the device for all small tensors of a step.

A copy has a fixed cost, and a step has a dozen small arrays: ids, positions, slots, block tables, sampling parameters.
So all that a step needs is built on the host, packed into one buffer and moved by one copy, which nothing waits for.
m2 moved each tensor by itself. vLLM keeps a pinned array for each input instead (`CpuGpuBuffer`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from m1_single_request.sampling_metadata import sent

T = TypeVar("T")
NUMBER = int, type(None)
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel again for a pointer that is not a multiple of 16."""


def to_device(batch: T, device: torch.device) -> T:
    """Return a batch whose tensors are all on the device, by one copy; on a CPU it is the same batch.

    `batch` is a tensor, or a tuple or dataclass with such parts among others. Tensors that are on the device already
    stay.
    """
    if device.type == "cpu":
        return batch
    return _replaced(batch, iter(_sent_together(list(_on_host(batch)), device)))


def _sent_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on the device, as views of one buffer there.

    The host does not wait for the copy. Pinned memory is allocated again only when the copies from it have ended
    (torch's `CachingHostAllocator`), and the memory on the device in the order of its stream. So steps that are queued
    one behind the other need no ring of buffers: each has its own.
    """
    tensors = [tensor.contiguous() for tensor in tensors]
    *starts, size = accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def views(buffer: Tensor) -> list[Tensor]:
        typed = {dtype: buffer.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
        pairs = zip(starts, tensors, strict=True)
        return [typed[each.dtype].as_strided(each.shape, each.stride(), at // each.itemsize) for at, each in pairs]

    for target, tensor in zip(views(packed), tensors, strict=True):
        target.copy_(tensor)
    return views(sent(packed, device))


def _on_host(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch that are on the host, in a fixed order."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            yield value
    elif (parts := _parts(value)) is not None:
        for part in parts.values():
            yield from _on_host(part)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a batch with `tensors` in place of those that `_on_host` yields."""
    if isinstance(value, Tensor):
        return next(tensors) if value.is_cpu else value
    if (parts := _parts(value)) is None:
        return value
    replaced = {name: _replaced(part, tensors) for name, part in parts.items()}
    return tuple(replaced.values()) if isinstance(value, tuple) else type(value)(**replaced)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a dataclass or tuple; None for other values, and for tuples of numbers, which may be long."""
    if isinstance(value, NUMBER):
        return None
    if isinstance(value, tuple):
        return dict(enumerate(value)) if value and not isinstance(value[0], int) else None
    return vars(value) if is_dataclass(value) else None
