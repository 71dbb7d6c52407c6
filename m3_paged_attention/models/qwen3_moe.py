"""Experts (mixture of experts): in a sparse layer each token uses a few of many small MLPs, which a router chooses.

So a model has many weights and computes with few of them: Qwen3-30B-A3B has 30 billion, and a token uses 3. It is the
network of Qwen3 otherwise. This file has the router, and the layouts in which files store experts; `Backend.experts`
computes the chosen ones. m1 and m2 refuse such models. Shazeer et al.,
"Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer" (2017). vLLM:
`model_executor/models/qwen3_moe.py` and `layers/fused_moe`; SGLang: `models/qwen3_moe.py` and `layers/moe`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.models.experts_config import ExpertsConfig

Layout = Literal["single", "stacked", "transposed"]
"""How files store the experts of a layer: each expert in tensors of its own (Qwen3-MoE), or all in one tensor, which
hub files of Qwen3-VL-MoE transpose and files that transformers has written do not."""
MODULES = {"gate_up": ["gate_proj", "up_proj"], "down": ["down_proj"]}
"""For a field of `LayerWeights`: the modules of an expert in the files."""


class StackedExperts:
    """The place of a layer's experts that a file stores in one tensor."""

    def __init__(self, experts: Sequence[Weight], is_transposed: bool) -> None:
        self.experts, self.is_transposed = experts, is_transposed
        rows, columns = experts[0].shape
        self.dtype = experts[0].dtype
        self.shape = torch.Size((len(experts), *((columns, rows) if is_transposed else (rows, columns))))

    def copy_(self, stored: Tensor) -> None:
        """Overwrite the experts, one by one, by a tensor of this shape."""
        for place, expert in zip(self.experts, stored, strict=True):
            place.copy_(expert.t() if self.is_transposed else expert)


def parts_of_experts(
    config: ExpertsConfig, mlp: str, field: str, weight: Weight, layout: Layout
) -> dict[str, Weight | StackedExperts]:
    """Return the parts of a weight of all experts by their names in the files, which begin with `mlp`.

    `field`: `gate_up` or `down`.
    """
    experts: Sequence[Weight] = weight.split_with_sizes([len(weight) // config.num_experts] * config.num_experts)
    if layout != "single":
        return {f"{mlp}.experts.{field}_proj": StackedExperts(experts, layout == "transposed")}
    modules, parts = MODULES[field], dict[str, Weight | StackedExperts]()
    sizes = [len(weight) // (config.num_experts * len(modules))] * len(modules)
    for number, expert in enumerate(experts):
        rows: Sequence[Weight] = expert.split_with_sizes(sizes)
        parts |= {f"{mlp}.experts.{number}.{name}.weight": part for name, part in zip(modules, rows, strict=True)}
    return parts


def layout_of(config: ExpertsConfig, hidden_size: int, shapes: Mapping[str, Sequence[int]], mlp: str) -> Layout:
    """Return how files store the experts of a layer. `shapes`: of their tensors, by name.

    The transposed shape of a tensor may be the same: for gate and up if `hidden_size` is twice the width of an expert,
    for down if both are equal. It is never the same for both, so one of them decides.
    """
    found = {field: list(shapes.get(f"{mlp}.experts.{field}_proj", ())) for field in ("gate_up", "down")}
    if not any(found.values()):
        return "single"
    hidden, inner = hidden_size, config.intermediate_size
    for field, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        if rows != columns and found[field] == [config.num_experts, columns, rows]:
            return "transposed"
    return "stacked"


class SparseMLP:
    """The MLP of a sparse layer: the sum of the experts that its router chooses for a token, each times a weight."""

    def __init__(self, config: ExpertsConfig, router: Tensor, gate_up: Weight, down: Weight, backend: Backend) -> None:
        """`router`: `[num_experts, hidden_size]`; `gate_up` and `down`: those of all experts, one after the other."""
        self.top_k, self.normalizes, self.num_experts = config.top_k, config.normalizes, len(router)
        self.router = backend.linear(router)
        self.experts = backend.experts(gate_up, down, config.num_experts)
        self.observe: Callable[[Tensor], Any] | None = None
        """Called with the chosen experts of each step."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the MLP. `[num_tokens, hidden_size]` in and out."""
        return self.experts(hidden, *self.choose(self.router(hidden)))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, int64, and their weights, in the model's precision: `[num_tokens, top_k]`.

        `logits`: the router's, `[num_tokens, num_experts]`. Probabilities are over all experts, in float32, and so is
        the division. Of equally probable experts `torch.topk` decides, on every backend: another rule would compute
        another model.
        """
        weights, experts = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self.top_k)
        if self.normalizes:
            weights /= weights.sum(-1, keepdim=True)
        if self.observe is not None:
            self.observe(experts)
        return experts, weights.to(logits.dtype)
