"""Linear layers of the `native` backend: weights in panels, in the order in which they are read.

`native/linear.h` and `native/int8.h` have the panels and the kernels.
"""

import contextlib
import ctypes
import mmap
from types import SimpleNamespace

import torch
from torch import Tensor

from m3_paged_attention.int8_weight import Weight

PANEL = 64  # output features stored together
MOST_KEPT = 2**24  # bytes of logits that a layer keeps for its next call


class NativeLinear:
    """Linear layer of the C++ kernels, with its weight in panels: as it is, or quantized."""

    __slots__ = ("_kernels", "_logits", "_tokens", "bias", "dtype", "in_features", "kind", "out_features", "packed")

    def __init__(self, kernels: SimpleNamespace, weight: Weight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self.out_features, self.in_features = weight.shape
        self.dtype, self.kind = weight.dtype, 0 if isinstance(weight, Tensor) else 1  # `LinearKind` of layers.h
        rows = -(-self.out_features // PANEL) * PANEL
        self.packed = on_huge_pages(rows * weight.nbytes // self.out_features)
        self.bias = None if bias is None else bias.contiguous()
        self._logits, self._tokens = torch.empty(0, dtype=self.dtype), (ctypes.c_long * 0)()
        self.pack(weight)

    def pack(self, weight: Weight) -> None:
        """Write a weight `[out_features, in_features]`, of the same class as the first one, to the panels."""
        tensors = [weight.contiguous()] if isinstance(weight, Tensor) else [weight.values, weight.scales]
        kernel = (self._kernels.pack, self._kernels.pack_int8)[self.kind]
        kernel(*tensors, self.packed, self.in_features, self.out_features, torch.get_num_threads())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the output `[tokens, out_features]` for `hidden` `[tokens, in_features]`."""
        assert hidden.shape[1] == self.in_features and hidden.dtype == self.dtype
        hidden, rows = hidden.contiguous(), hidden.shape[0]
        y = hidden.new_empty(rows, self.out_features)
        shape = rows, self.in_features, self.out_features
        kernel = (self._kernels.linear, self._kernels.linear_int8)[self.kind]
        kernel(hidden, self.packed, self.bias, y, *shape, torch.get_num_threads())
        return y

    def best_tokens(self, hidden: Tensor) -> list[int]:
        """Return the output feature with the largest value of each row; -1 if a value is not finite.

        The memory for a few rows is kept from call to call: to allocate it would take a tenth of a small step.
        """
        rows, width = hidden.shape
        assert width == self.in_features and hidden.dtype == self.dtype
        hidden, logits, tokens = hidden.contiguous(), self._logits, self._tokens
        if rows > len(tokens):
            logits, tokens = hidden.new_empty(rows, self.out_features), (ctypes.c_long * rows)()
            if logits.nbytes <= MOST_KEPT:
                self._logits, self._tokens = logits, tokens
        pointers = hidden.data_ptr(), self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        shape = rows, self.in_features, self.out_features, torch.get_num_threads()
        self._kernels.best_tokens(*pointers, logits.data_ptr(), ctypes.addressof(tokens), self.kind, *shape)
        return tokens[:rows]


def on_huge_pages(num_bytes: int) -> Tensor:
    """Return an uninitialised uint8 tensor `[num_bytes]`, for which Linux uses pages of 2 MiB where it can.

    A core that reads 25 GB in a second needs the address of another page of 4 KiB every 160 nanoseconds. Of huge
    pages there are so few that the core keeps their addresses in its cache, the TLB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
