"""Typical mistakes in local experts, each with the hint that it must get."""

from typing import Any

import torch
from torch import Tensor

from m8_parallel.models.parallel_decoder import LocalExperts


class Overwrites(LocalExperts):
    """A token's second expert takes the place of its first."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        own = experts - self.first
        is_own = (own >= 0) & (own < self.count)
        tokens, _ = is_own.nonzero(as_tuple=True)
        sums = torch.zeros_like(hidden)
        if len(tokens):
            sums[tokens] = self.experts(hidden[tokens], own[is_own][:, None], weights[is_own][:, None])
        return sums


class WithZeros(LocalExperts):
    """Other ranks' experts are computed as one of this rank, with the weight 0."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        own = experts - self.first
        is_own = (own >= 0) & (own < self.count)
        if not is_own.any():
            return torch.zeros_like(hidden)
        result: Tensor = self.experts(hidden, own.where(is_own, 0), weights * is_own)
        return result


class KeepsNumbers(LocalExperts):
    """The layer is asked for the numbers of all ranks."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        is_own = (experts >= self.first) & (experts < self.first + self.count)
        tokens, _ = is_own.nonzero(as_tuple=True)
        sums = torch.zeros_like(hidden)
        if len(tokens):
            outputs = self.experts(hidden[tokens], experts[is_own][:, None], weights[is_own][:, None])
            sums.index_add_(0, tokens, outputs)
        return sums


class Normalises(LocalExperts):
    """The weights of what is here are made to have the sum 1."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        is_own = (experts >= self.first) & (experts < self.first + self.count)
        total = (weights * is_own).sum(1, keepdim=True).clamp(min=1e-9)
        return super().__call__(hidden, experts, weights / total)


class InPlace(LocalExperts):
    """The experts' numbers are changed where they are."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result: Any = super().__call__(hidden, experts.clone(), weights)
        experts -= self.first + 1
        return result


class AlwaysAsks(LocalExperts):
    """Works for a rank that no token has chosen."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        own = experts - self.first
        is_own = (own >= 0) & (own < self.count)
        if not is_own.any():
            self.experts(hidden, torch.zeros_like(experts), torch.zeros_like(weights))
        return super().__call__(hidden, experts, weights)


WRONG = [
    (Overwrites, "do not overwrite it"),
    (WithZeros, "Zeros as weights would give the right sum"),
    (KeepsNumbers, "subtract `first`"),
    (Normalises, "the weights stay as they are"),
    (InPlace, "Work on new tensors"),
    (AlwaysAsks, "No token, no work"),
]
