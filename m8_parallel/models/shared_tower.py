"""A vision tower on every rank: each encodes some of the images of a step, and all get all embeddings.

A tower is small beside its language model, and an image needs nothing of another one. So the tower is not cut: every
rank has all of it, and images are shared out (data parallel). The largest image goes first, each to the rank that has
fewest patches so far. SGLang: `run_dp_sharded_mrope_vision_model` in `multimodal/mm_utils.py`; vLLM:
`run_dp_sharded_mrope_vision_model` in `model_executor/models/vision.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from m6_multimodal_pd.models.vision_network import Grid
from m8_parallel.ranks import Ranks


class SharedTower:
    """The tower of a rank, in place of m6's: `encode` also brings the embeddings of the other ranks."""

    def __init__(self, tower: Any, ranks: Ranks) -> None:
        self._tower, self._ranks = tower, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def encode(self, items: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        """Encode this rank's part of `items`; return the embeddings of all, as the tower does."""
        tower, ranks = self._tower, self._ranks
        if ranks.size == 1 or not items:
            encoded: list[Tensor] = tower.encode(items)
            return encoded
        parts = shared_out([len(patches) for patches, _ in items], ranks.size)
        counts = [tower.num_tokens(grid) for _, grid in items]
        rows = max(sum(counts[index] for index in part) for part in parts)
        own = torch.zeros(rows, tower.width, dtype=tower.dtype, device=tower.device)
        mine = tower.encode([items[index] for index in parts[ranks.rank]])
        if mine:  # a rank may have no image
            torch.cat(mine, out=own[: sum(map(len, mine))])
        ranks.meet_in_step()  # an image may take longer than a collective waits
        embeddings: list[Tensor] = [own[:0]] * len(items)
        for part, found in zip(parts, ranks.all_gather(own), strict=True):
            lengths = [counts[index] for index in part]
            for index, rows_of in zip(part, found[: sum(lengths)].split_with_sizes(lengths), strict=True):
                embeddings[index] = rows_of.clone()  # one may be kept while the others are freed
        return embeddings


def shared_out(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the indices of the items of each rank: the largest first, each to the rank with least so far, the first of
    several."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        parts[rank].append(index)
        loads[rank] += sizes[index]
    return parts
