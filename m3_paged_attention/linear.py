"""Linear layers: one weight, in whichever form the backend multiplies fastest, and in no other.

A decode step is little more than reading weights, and the order in which they lie decides how fast that goes. So a
layer does not call `F.linear`: it asks its backend for the layer, hands over the weight, and keeps what it gets. Here
are the two forms that plain torch has: the weight as it stands in the files, and oneDNN's own layout, the CPU's answer
to small batches. m2 brought large float32 layers of transformers' model into that layout afterwards; the model is ours
now, and every precision that this processor packs is packed.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from m1_single_request.precision import can_pack
from m2_continuous_batching.packed_linear import linear_of_packed, pack_weight

MIN_WEIGHTS = 2**16  # below, the call itself costs more than the layout saves
NUM_ROWS = 16  # the batch for which oneDNN chooses the layout


class Linear(Protocol):
    """`y = x W^T + b` of one layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`."""


class PlainLinear:
    """The weight as it stands in the files."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out_features, in_features]
        self.bias = bias  # [out_features]

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`."""
        return functional.linear(hidden, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's layout."""

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Tensor, bias: Tensor | None = None) -> None:
        self.packed = packed  # [out_features, in_features], opaque: only the product can read it
        self.bias = bias  # [out_features]

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`."""
        return linear_of_packed(hidden, self.packed, self.bias)


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | None:
    """The layer in packed form, or None where `F.linear` is the better or the only choice.

    The packed form is a copy: drop `weight` afterwards, and its memory is free again.
    """
    if weight.numel() < MIN_WEIGHTS or not can_pack(weight.dtype, weight.device):
        return None
    return PackedLinear(pack_weight(weight, NUM_ROWS), bias)
