"""Linear layers for small batches on a CPU: weights in the layout that the processor's matrix library wants.

Not m2's idea, but its idea brings it out: with 16 rows instead of one, half of a decode step is matrix products, and
`F.linear` brings the weight into another layout in every call. oneDNN can be given it ready-made. The packed form
replaces the original. Only large float32 weights are packed here; all others, and those on a GPU, stay as they are.
torch.compile does the same when it freezes a model.
"""

import torch
from torch import Tensor, nn

from m1_single_request.precision import can_pack

MIN_WEIGHTS = 150_000  # below, the call itself costs more than the layout saves
NUM_ROWS = 16  # the batch for which oneDNN chooses the layout; others work as well, a little slower


class PackedLinear(nn.Module):
    """`y = x W^T + b` with `W` in oneDNN's layout; float32, on the CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = pack_weight(linear.weight, NUM_ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return linear_of_packed(hidden, self.packed, self.bias)


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace the large float32 linear layers of `model` by packed ones; returns how many.

    An embedding that shares its weight with the output layer keeps it, so that this one weight is there twice.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype == torch.float32
        and can_pack(child.weight.dtype, child.weight.device)
        and child.weight.numel() >= MIN_WEIGHTS
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """A copy of `weight` `[out_features, in_features]` in the layout that oneDNN likes best for so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def linear_of_packed(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a packed weight: `[..., in_features]` to `[..., out_features]`."""
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
