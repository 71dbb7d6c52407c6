"""Weights of linear layers in oneDNN's own layout: the CPU's answer to small batches.

m2 did this for the large float32 layers of transformers' model. The model is ours now, so nothing is replaced
afterwards: a layer asks for the packed form when it is built, in every precision that this processor packs, and keeps
nothing else.
"""

from torch import Tensor

from m2_continuous_batching.packed_linear import can_pack, linear_of_packed, pack_weight

MIN_WEIGHTS = 2**16  # below, the call itself costs more than the layout saves
NUM_ROWS = 16  # the batch for which oneDNN chooses the layout


class PackedWeight:
    """One packed linear layer: `packed(hidden)` is `F.linear(hidden, weight, bias)`."""

    __slots__ = ("bias", "packed")

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self.packed = packed  # [out_features, in_features], opaque: only the product can read it
        self.bias = bias  # [out_features]

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return linear_of_packed(hidden, self.packed, self.bias)


def pack(weight: Tensor, bias: Tensor | None = None, *, rows: int = NUM_ROWS) -> PackedWeight | None:
    """The layer in packed form, or None where `F.linear` is the better or the only choice.

    The packed form is a copy: drop `weight` afterwards, and its memory is free again.
    """
    if weight.numel() < MIN_WEIGHTS or not can_pack(weight.dtype, weight.device):
        return None
    return PackedWeight(pack_weight(weight, rows), bias)
