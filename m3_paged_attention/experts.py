"""Experts as linear layers: the layouts of plain torch, as `linear.py` has them for one MLP.

The rows of tokens are ordered by expert, and each expert with rows computes its own; the others are not read. The
result of a token is the sum over its experts in the router's order, so it is the same in every run. In a trial at one
token on a CPU, packed linear layers took 0.6 of the time of `torch.nn.functional.grouped_mm`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.linear import Linear


class Experts(Protocol):
    """The experts of a layer, each `down(silu(gate(x)) * up(x))`.

    `gate_up` and `down` have the weights: tensors as in `LayerWeights`, or objects whose method `pack` copies one.
    """

    gate_up: Any
    down: Any

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums `[tokens, hidden_size]` of the chosen experts.

        `hidden`: `[tokens, hidden_size]`; `experts`: int64 `[tokens, top_k]`, all different in a row; `weights`: the
        same shape, in the precision of `hidden`.
        """


class StackedLinears:
    """The same linear layer of all experts."""

    def __init__(self, linear: Callable[[Weight], Linear], weight: Weight, num_experts: int) -> None:
        """`weight`: `[num_experts * out_features, in_features]`."""
        self.layers: list[Any] = [linear(part) for part in _split(weight, num_experts)]

    def pack(self, weight: Weight) -> None:
        """Store a copy of a weight of the same class and shape."""
        for layer, part in zip(self.layers, _split(weight, len(self.layers)), strict=True):
            if hasattr(layer, "pack"):
                layer.pack(part)
            else:
                layer.weight.copy_(part)


class LinearExperts:
    """Experts that are computed one by one, with linear layers of a backend."""

    def __init__(self, backend: Any, gate_up: Weight, down: Weight, num_experts: int) -> None:
        self.silu_mul, self.num_experts = backend.silu_mul, num_experts
        self.gate_up = StackedLinears(backend.linear, gate_up, num_experts)
        self.down = StackedLinears(backend.linear, down, num_experts)

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts."""
        (num_tokens, top_k), pairs = experts.shape, experts.flatten()
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=self.num_experts).tolist()
        rows = hidden[order // top_k].split_with_sizes(counts)
        outputs = [
            down(self.silu_mul(gate_up(of_expert)))
            for gate_up, down, of_expert in zip(self.gate_up.layers, self.down.layers, rows, strict=True)
            if len(of_expert)
        ]
        by_token = hidden.new_empty(num_tokens * top_k, hidden.shape[1]).index_copy_(0, order, torch.cat(outputs))
        weighted = by_token.view(num_tokens, top_k, -1).float() * weights.float()[..., None]
        return weighted.sum(1).to(hidden.dtype)


def _split(weight: Weight, num_experts: int) -> Any:
    return weight.split_with_sizes([len(weight) // num_experts] * num_experts)
