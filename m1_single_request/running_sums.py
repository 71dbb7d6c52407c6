"""Search in the running sums of a row of weights, in an order of additions that never changes.

A draw is such a search: the first token at which the sum of the weights exceeds a share of their total; top_p is the
same search over the best tokens first. Floats that are added in another order have another sum, and then another token
may be drawn. On a CPU `cumsum` adds from left to right. On a GPU it has no fixed order, so two runs may differ there.

A GPU uses two facts instead. A tree of additions, element by element, has one order only: it gives the sum of each
block of `BLOCK` weights. And whole numbers have the same sum in any order: the sums of the blocks, and the weights of
the one block in which the search ends, are converted to them. vLLM draws without sums, as the argmax of p / Exp(1),
with a random number per token.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 512
"""Number of weights that are added as floats; a power of two."""
SCALE = 2.0**40
"""Whole numbers for a weight of 1: they leave room for the sum of eight million such weights."""
BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1. Its product with a float32, rounded, is less than that one."""


def search_running_sums(weights: Tensor, shares: Tensor, *, right: bool) -> Tensor:
    """Return the first index per row at which the running sum exceeds the share of the row's total, int64 `[rows]`.

    `weights` `[rows, n]` of 0 to 1, `shares` `[rows]` of 0 to 1. `right=False`: at which it reaches the share, as in
    `torch.searchsorted`. The weight at the index is not zero if one in the row is not, and the result depends on no
    other row.
    """
    search = search_in_sequence if weights.is_cpu else search_in_blocks
    return search(weights, shares, right=right)


def search_in_sequence(weights: Tensor, shares: Tensor, *, right: bool) -> Tensor:
    """Search where `cumsum` adds from left to right. NumPy takes less time than torch for a number per row."""
    sums = weights.cumsum(dim=-1)
    totals = sums.numpy()[:, -1:]
    limits = (np.minimum(shares.numpy(), BELOW_ONE)[:, None] * totals).astype(totals.dtype)
    return torch.searchsorted(sums, torch.from_numpy(limits), right=right)[:, 0]


def search_in_blocks(weights: Tensor, shares: Tensor, *, right: bool) -> Tensor:
    """Search for the block first, then inside it."""
    blocks = in_blocks(weights)
    sums = as_integers(sums_of_blocks(blocks))  # [rows, blocks]
    ends = sums.cumsum(dim=-1)
    limits = shares.double() * ends[:, -1]
    limits = (limits.floor() if right else limits.ceil() - 1).long().minimum(ends[:, -1] - 1)
    block = (ends <= limits[:, None]).sum(dim=-1).clamp_(max=sums.shape[-1] - 1)
    row = torch.arange(len(weights), device=weights.device)
    inside = as_integers(blocks[row, block]).cumsum(dim=-1)  # [rows, BLOCK]
    rest = (limits - (ends - sums)[row, block]).minimum(inside[:, -1] - 1)  # the sum of the floats was rounded
    found = block * BLOCK + (inside <= rest[:, None]).sum(dim=-1)
    return found.clamp_(max=weights.shape[-1] - 1)  # a row of NaN leads anywhere: a GPU must not read there


def in_blocks(weights: Tensor) -> Tensor:
    """Return `weights` `[rows, n]` as `[rows, blocks, BLOCK]`, with zeros behind the last one."""
    return pad(weights, (0, -weights.shape[-1] % BLOCK)).view(len(weights), -1, BLOCK)


def sums_of_blocks(blocks: Tensor) -> Tensor:
    """Add the weights of each block, `[..., BLOCK]` to `[...]`: one half to the other, until one number is left."""
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        blocks = blocks[..., :half] + blocks[..., half:]
    return blocks[..., 0]


def as_integers(weights: Tensor) -> Tensor:
    """Return the weights as int64, in units of 1 / SCALE: zero for zero only."""
    return (weights.double() * SCALE).ceil().long()
