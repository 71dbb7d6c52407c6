"""Linear layers for small batches on a CPU, with weights in the layout of the processor's matrix library.

New in m2, because batching makes it matter: with 16 rows instead of one, half of a decode step is matrix products, and
`F.linear` converts the weight to another layout in every call. oneDNN accepts a weight that is already converted
(packed). The packed weight replaces the original. Only large float32 weights are packed here; all others, and those on
a GPU, stay unchanged. torch.compile does the same when it freezes a model.
"""

import torch
from torch import Tensor, nn

from m1_single_request.precision import can_pack

MIN_WEIGHTS = 150_000  # for fewer weights, the call costs more than the layout saves
NUM_ROWS = 16  # the batch size for which oneDNN chooses the layout; other sizes are a little slower


class PackedLinear(nn.Module):
    """Linear layer `y = x W^T + b` with `W` in oneDNN's layout; float32, on the CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.packed = pack_weight(linear.weight, NUM_ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `y` `[..., out_features]` for `hidden` `[..., in_features]`."""
        return linear_of_packed(hidden, self.packed, self.bias)


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace the large float32 linear layers of `model` by packed ones; return their number.

    An embedding that shares its weight with the output layer keeps the original, so this weight is in memory twice.
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
    """Return a copy of `weight` `[out_features, in_features]` in the layout that oneDNN chooses for `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def linear_of_packed(hidden: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` with a packed weight: `[..., in_features]` to `[..., out_features]`."""
    return torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
