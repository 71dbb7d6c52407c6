"""Linear layers for small batches on a CPU: weights in the layout that the processor's matrix library wants.

Not m2's idea, but its idea brings it out: with 16 rows instead of one, half of a decode step is matrix products, and
`F.linear` brings the weight into another layout in every call. oneDNN can be given it ready-made. The packed form
replaces the original. Only large float32 weights gain; all others, and all weights on a GPU, stay as they are.
torch.compile does the same when it freezes a model.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MIN_WEIGHTS = 150_000  # below, the call itself costs more than the layout saves


class PackedLinear(nn.Module):
    """`y = x W^T + b` with `W` in oneDNN's layout; float32, on the CPU."""

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        return torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")


@torch.inference_mode()
def pack_linears(model: PreTrainedModel, *, num_rows: int) -> int:
    """Replace the large linear layers of `model` by packed ones, made for batches of `num_rows`; returns how many.

    An embedding that shares its weight with the output layer keeps it, so that this one weight is there twice.
    """
    if not _can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.device.type == "cpu"
        and child.weight.dtype == torch.float32
        and child.weight.numel() >= MIN_WEIGHTS
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, num_rows))
    return len(found)


def _can_pack() -> bool:
    """Whether this build of torch has the operations, which are not part of its public interface."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and all(hasattr(torch.ops.mkldnn, name) for name in names)
