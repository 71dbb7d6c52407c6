"""The experts of the `triton` backend: launches the kernels of `triton_experts.py`.

As in `triton_backend.py`, all sizes depend on shapes: a call never waits for the GPU, and can be captured in a graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_paged_attention.attention.triton_experts import experts_kernel, order_by_expert_kernel
from m3_paged_attention.attention.triton_tiles import Tile, experts_tile, power_of_two


class TritonExperts:
    """Experts whose pairs with tokens are ordered first."""

    def __init__(self, silu_mul: Callable[[Tensor], Tensor], gate_up: Tensor, down: Tensor, num_experts: int) -> None:
        """`silu_mul` and the weights: as in `Backend`."""
        self.silu_mul, self.gate_up, self.down, self.num_experts = silu_mul, gate_up, down, num_experts

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts."""
        (num_tokens, top_k), device = experts.shape, hidden.device
        num_pairs = num_tokens * top_k
        tile = experts_tile(-(-num_pairs // self.num_experts), hidden.dtype, device.type)
        most = num_pairs // tile.block_m + min(num_pairs, self.num_experts)  # tiles: one that is not full per expert
        pairs = torch.empty(most * tile.block_m, dtype=torch.int32, device=device)
        tile_experts = torch.full((most,), -1, dtype=torch.int32, device=device)
        order_by_expert_kernel[(self.num_experts,)](
            experts,
            pairs,
            tile_experts,
            num_pairs,
            NUM_EXPERTS=self.num_experts,
            EXPERTS_PAD=max(32, power_of_two(self.num_experts + 1)),
            BLOCK_M=tile.block_m,
            CHUNK=max(32, min(1024, power_of_two(num_pairs))),
        )
        chosen = pairs, tile_experts, num_pairs, tile
        gated = self.silu_mul(self._product(hidden, self.gate_up, None, chosen, top_k))
        outputs = self._product(gated, self.down, weights, chosen, 1)
        return outputs.view(num_tokens, top_k, -1).sum(1)

    def _product(
        self, x: Tensor, weight: Tensor, scales: Tensor | None, chosen: tuple[Tensor, Tensor, int, Tile], top_k: int
    ) -> Tensor:
        """Multiply the row of each pair with the weight of its expert: `[num_pairs, out_features]`."""
        (pairs, tile_experts, num_pairs, tile), (rows, in_features) = chosen, weight.shape
        out_features = rows // self.num_experts
        assert x.is_contiguous() and weight.is_contiguous() and (scales is None or scales.is_contiguous())
        out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
        experts_kernel[(len(tile_experts), -(-out_features // tile.block_n))](
            x,
            weight,
            x if scales is None else scales,
            pairs,
            tile_experts,
            out,
            num_pairs,
            TOP_K=top_k,
            IN=in_features,
            OUT=out_features,
            HAS_SCALES=scales is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=32 if x.dtype == torch.float32 else 64,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out
