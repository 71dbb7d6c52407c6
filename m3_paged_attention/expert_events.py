"""Events about experts: how many weights they are, and which of them the tokens of a step have used.

vLLM has a recorder of the same counts for its load balancing (EPLB); SGLang: `ExpertDistributionRecorder`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.trace_event import Event, size, some


@dataclass(frozen=True, kw_only=True)
class ExpertsLoaded(Event):
    """The model has experts."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    num_layers: int
    """Layers of the model."""
    num_sparse_layers: int
    """Layers with experts; the others have one MLP."""
    num_experts: int
    """Experts of a sparse layer."""
    top_k: int
    """Experts that a token uses in a sparse layer."""
    expert_bytes: int
    """Size of one expert's weights."""
    weight_bytes: int
    """Size of all weights of the model."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self | None:
        """Build the event for a loaded model, whose `model` is a `Decoder`; None if it has no experts."""
        config = loaded.model.config
        if config.experts is None:
            return None
        return cls(
            num_layers=config.num_layers,
            num_sparse_layers=len(config.experts.layers),
            num_experts=config.experts.num_experts,
            top_k=config.experts.top_k,
            expert_bytes=loaded.model.expert_bytes,
            weight_bytes=loaded.weight_bytes,
        )

    def explain(self) -> str:
        held = self.num_sparse_layers * self.num_experts * self.expert_bytes
        read = self.num_sparse_layers * self.top_k * self.expert_bytes
        return (
            f"{self.num_sparse_layers} of {some(self.num_layers, 'layer')} have {some(self.num_experts, 'expert')} of "
            f"{size(self.expert_bytes)} each: {size(held)} of the model's {size(self.weight_bytes)}. A token uses "
            f"{self.top_k} in each layer: it reads {size(read)} of them."
        )


@dataclass(frozen=True, kw_only=True)
class ExpertsUsed(Event):
    """The experts that the router has chosen for the tokens of a forward."""

    style: ClassVar[str] = "bright_blue"
    layers: tuple[int, ...]
    """Indices of the sparse layers."""
    num_experts: int
    """Experts of a layer."""
    loads: tuple[int, ...]
    """The number of tokens that use an expert: of all experts of the first sparse layer, then of the next one."""
    top_k: int
    """Experts that a token uses in a layer."""
    expert_bytes: int
    """Size of one expert's weights."""

    @classmethod
    def of(cls, layers: Sequence[int], chosen: Sequence[Tensor], num_experts: int, expert_bytes: int) -> Self:
        """Build the event. `chosen`: the experts of each token, `[num_tokens, top_k]`, for each sparse layer."""
        pairs = torch.stack(list(chosen)).flatten(1)
        counts = torch.zeros(len(pairs), num_experts, dtype=torch.int64, device=pairs.device)
        loads = counts.scatter_add_(1, pairs, torch.ones_like(pairs)).flatten().tolist()
        return cls(
            layers=tuple(layers),
            num_experts=num_experts,
            loads=tuple(loads),
            top_k=chosen[0].shape[1],
            expert_bytes=expert_bytes,
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.loads) // (self.top_k * len(self.layers))

    @property
    def mean_load(self) -> float:
        """Tokens of an expert on average."""
        return sum(self.loads) / len(self.loads)

    @property
    def num_read(self) -> int:
        """Experts of all layers that have a token: only their weights are read."""
        return sum(count > 0 for count in self.loads)

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights of these experts."""
        return self.num_read * self.expert_bytes

    def counters(self) -> dict[str, float]:
        return {"MiB of experts read": round(self.read_bytes / 2**20, 1)}

    def brief(self) -> str | None:
        return f"{self.num_read:,} of {len(self.loads):,} experts"

    def explain(self) -> str:
        busiest = self.loads.index(max(self.loads))
        place, expert = divmod(busiest, self.num_experts)
        return (
            f"{some(self.num_tokens, 'token')} chose {self.top_k} of {self.num_experts} experts in each of "
            f"{some(len(self.layers), 'layer')}: {self.num_read:,} of {len(self.loads):,} were read, "
            f"{size(self.read_bytes)} of {size(len(self.loads) * self.expert_bytes)}. The busiest, expert {expert} of "
            f"layer {self.layers[place]}, has {some(self.loads[busiest], 'token')}; the mean is {self.mean_load:.1f}."
        )
