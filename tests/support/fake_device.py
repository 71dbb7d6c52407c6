"""A device without a GPU: its tensors are of the CPU, and each copy from the host to it is counted.

A copy is queued. It is made when an operation on the device, the first one behind it, needs it; until then the memory
on the device holds other numbers. Then the memory on the host is spoiled, as if another step had it. So a step that
reads what it has not sent, or that changes what it has sent, computes something else than on a CPU.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from m3_paged_attention.attention import host_to_device

DEVICE = torch.device("xla")
"""Of a kind that is not CUDA, for which memory of the host would be pinned, and no CPU."""
OTHER = 0
"""Each byte of memory that nobody should read. Other numbers would be slots far outside of the KV memory."""
PACKAGES = ("m3_", "m4_", "m5_", "m6_")
READS_NOTHING = ("__get__", "__len__", "view", "size", "dim", "numel", "unbind", "as_strided")


class OnDevice(Tensor):
    """A tensor of the device, or computed from one."""

    device_of_test: "ClassVar[FakeDevice]"
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_slice = func.__name__ == "__getitem__" and isinstance(args[1], slice)
        if not is_slice and func.__name__ not in READS_NOTHING:
            cls.device_of_test.complete()
        return super().__torch_function__(func, types, args, kwargs or {})


class FakeDevice:
    """Counts the copies from the host."""

    def __init__(self) -> None:
        self.num_copies = 0
        self.queued: list[tuple[Tensor, Tensor]] = []

    def sent(self, tensor: Tensor, device: Any = None) -> Tensor:
        """In place of m1's `sent`."""
        if isinstance(tensor, OnDevice):
            return tensor
        self.num_copies += 1
        there = torch.empty_like(tensor)
        if there.numel():
            there.view(torch.uint8).fill_(OTHER)
        self.queued.append((tensor, there))
        return there.as_subclass(OnDevice)

    def complete(self) -> None:
        """Make the queued copies."""
        while self.queued:
            tensor, there = self.queued.pop(0)
            there.copy_(tensor)
            if tensor.numel():
                tensor.view(torch.uint8).fill_(OTHER)


def sending(function: Callable[..., Tensor | None], device: FakeDevice) -> Callable[..., Tensor | None]:
    """A function of m1 that makes a tensor and sends it."""

    def send(*args: Any) -> Tensor | None:
        made = function(*args)
        return None if made is None else device.sent(made)

    return send


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Let all engines of m3 and later have such a device; how many copies there were to it."""
    device, original = FakeDevice(), host_to_device.to_device
    monkeypatch.setattr(OnDevice, "device_of_test", device, raising=False)
    monkeypatch.setattr("m1_single_request.sampler.sent", device.sent)
    monkeypatch.setattr(host_to_device, "sent", device.sent)
    for module in [module for name, module in sys.modules.items() if name.startswith(PACKAGES)]:
        if getattr(module, "to_device", None) is original:
            monkeypatch.setattr(module, "to_device", lambda batch, _: original(batch, DEVICE))
        for name in ("bias_of", "seen_by", "output_counts_of"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, sending(getattr(module, name), device))
    yield device
    device.complete()
