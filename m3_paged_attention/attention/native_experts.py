"""The experts of the `native` backend: one C++ call computes those that the tokens of a step have chosen.

`native/experts.h` has the kernel. The weights of all experts are in panels, so a step of one token reads those of its
few experts at the speed of memory, as a linear layer of that size would be read.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from m3_paged_attention.attention.native_linear import PANEL, on_huge_pages
from m3_paged_attention.int8_weight import Weight

MOST_TOKENS = 2048
"""Maximum tokens at a time, which bounds the working memory. More of them would not be faster."""


class ExpertPanels:
    """The weights of a linear layer of all experts, in panels."""

    def __init__(self, kernels: SimpleNamespace, weight: Weight, num_experts: int, num_parts: int) -> None:
        """`weight`: `[num_experts * num_parts * features, in_features]`; the panels of the parts take turns."""
        self.kind = 0 if isinstance(weight, Tensor) else 1  # `LinearKind` of layers.h
        self._pack = kernels.pack_experts_int8 if self.kind else kernels.pack_experts
        self.features, self.in_features = len(weight) // (num_experts * num_parts), weight.shape[1]
        self._num_parts, self._num_experts = num_parts, num_experts
        rows = num_experts * num_parts * -(-self.features // PANEL) * PANEL
        self.packed = on_huge_pages(rows * weight.nbytes // len(weight))
        self.pack(weight)

    def pack(self, weight: Weight) -> None:
        """Write a weight of the same class and shape to the panels."""
        tensors = [weight.contiguous()] if isinstance(weight, Tensor) else [weight.values, weight.scales]
        shape = self.in_features, self.features, self._num_parts, self._num_experts
        self._pack(*tensors, self.packed, *shape, torch.get_num_threads())


class NativeExperts:
    """Experts of the C++ kernels. Working memory is shared by all layers."""

    def __init__(
        self, kernels: SimpleNamespace, gate_up: Weight, down: Weight, num_experts: int, work: dict[torch.dtype, Tensor]
    ) -> None:
        self.gate_up = ExpertPanels(kernels, gate_up, num_experts, 2)
        self.down = ExpertPanels(kernels, down, num_experts, 1)
        self._run, self._num_experts, self._work, self.dtype = kernels.run_experts, num_experts, work, gate_up.dtype

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts."""
        if len(hidden) > MOST_TOKENS:
            parts = [slice(start, start + MOST_TOKENS) for start in range(0, len(hidden), MOST_TOKENS)]
            return torch.cat([self(hidden[part], experts[part], weights[part]) for part in parts])
        (num_tokens, top_k), (hidden_size, width) = experts.shape, (self.down.features, self.gate_up.features)
        assert hidden.shape == (num_tokens, hidden_size) and hidden.dtype == weights.dtype == self.dtype
        assert experts.dtype == torch.int64 and experts.is_contiguous() and weights.is_contiguous()
        size = num_tokens * top_k * (2 * hidden_size + width)  # the rows of pairs, their insides and outputs
        work = self._work.get(self.dtype)
        if work is None or len(work) < size:
            work = self._work[self.dtype] = hidden.new_empty(size)
        hidden, y = hidden.contiguous(), torch.empty_like(hidden)
        tensors = hidden, experts, weights, self.gate_up.packed, self.down.packed, y, work
        shape = num_tokens, top_k, self._num_experts, hidden_size, width
        self._run(*tensors, self.gate_up.kind, *shape, torch.get_num_threads())
        return y
