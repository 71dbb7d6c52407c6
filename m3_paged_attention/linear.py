"""Linear layers: each weight is stored only in the layout that the backend multiplies fastest.

A decode step mostly reads weights, and its speed depends on their layout. So a decoder layer does not call `F.linear`:
it passes its weight to the backend and stores the layer that the backend returns. This file has the layouts of plain
torch: the weight as in the files, oneDNN's packed layout for small batches on a CPU, and quantized weights. m2 packed
the large float32 layers of transformers' model after loading; here every precision that the processor supports is
packed.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from m1_single_request.precision import can_pack
from m2_continuous_batching.packed_linear import linear_of_packed, pack_weight
from m3_paged_attention.int8_weight import Int8Weight, Weight

MIN_WEIGHTS = 2**16  # for fewer weights, the call costs more than the layout saves
NUM_ROWS = 16  # the batch size for which oneDNN chooses the layout


class Linear(Protocol):
    """A linear layer `y = x W^T + b`."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `y` `[tokens, out_features]` for `hidden` `[tokens, in_features]`."""


class PlainLinear:
    """Linear layer with the weight as in the files."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `y` `[tokens, out_features]` for `hidden` `[tokens, in_features]`."""
        return functional.linear(hidden, self.weight, self.bias)


class PackedLinear:
    """Linear layer with the weight in oneDNN's layout, which only the matrix product can read."""

    __slots__ = ("bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.pack(weight)
        self.bias = bias  # [out_features]

    def pack(self, weight: Tensor) -> None:
        """Store a copy of a weight `[out_features, in_features]` in this layout."""
        self.packed = pack_weight(weight, NUM_ROWS)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `y` `[tokens, out_features]` for `hidden` `[tokens, in_features]`."""
        return linear_of_packed(hidden, self.packed, self.bias)


class QuantizedLinear:
    """Linear layer with a quantized weight, which is converted to float32 in every call: slow, and runs everywhere."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias  # [out_features]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return `y` `[tokens, out_features]` for `hidden` `[tokens, in_features]`; sums are float32."""
        exact = hidden.float()
        parts = [functional.linear(exact, self.weight.dequantized(rows)) for rows in self.weight.rows_at_once()]
        y = torch.cat(parts, -1)
        return (y if self.bias is None else y + self.bias).to(hidden.dtype)


def plain(weight: Weight, bias: Tensor | None = None) -> Linear:
    """Return the layer with its weight as it is."""
    return PlainLinear(weight, bias) if isinstance(weight, Tensor) else QuantizedLinear(weight, bias)


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """Return the layer in packed form, or None if `F.linear` is faster or packing is not supported.

    The packed form is a copy: delete `weight` afterwards to free its memory.
    """
    if weight.numel() < MIN_WEIGHTS or not can_pack(weight.dtype, weight.device):
        return None
    return PackedLinear(weight, bias)
