"""The vision tower's network: a transformer over patches, and the mergers, which make one embedding of 2 x 2.

A patch attends to its own image; of a video, to its own layer of frames. Its place is given twice: by a learned table,
resized to the image's rows and columns, and by rotary angles, half of which turn with the row and half with the column.
A merger makes the vector of one token of 2 x 2 patches; more do so after middle layers (DeepStack). Patches come block
by block, so that the patches of a merger are consecutive. Names of tensors are those of the files. vLLM:
`Qwen3_VisionTransformer` in `models/qwen3_vl.py`; SGLang: `Qwen3VLMoeVisionModel` in `models/qwen3_vl.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from m3_paged_attention.linear import PlainLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
}
NORM_EPS = 1e-6
Grid = tuple[int, int, int]
"""Patches of an image in time, height and width; the last two are multiples of the merge size."""


def allocate(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Allocate the network's tensors, by name, uninitialised; on the device `meta` they use no memory."""
    hidden, inner = config.hidden_size, config.intermediate_size
    merged = hidden * config.spatial_merge_size**2
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    weights: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (hidden, *patch),
        "pos_embed": (config.num_position_embeddings, hidden),
    }
    for block in (f"blocks.{index}" for index in range(config.depth)):
        weights |= {f"{block}.norm1": (hidden,), f"{block}.norm2": (hidden,)}
        weights |= {f"{block}.attn.qkv": (3 * hidden, hidden), f"{block}.attn.proj": (hidden, hidden)}
        weights |= {f"{block}.mlp.linear_fc1": (inner, hidden), f"{block}.mlp.linear_fc2": (hidden, inner)}
    of_middle_layers = [f"deepstack_merger_list.{index}" for index in range(len(config.deepstack_visual_indexes))]
    for merger in ("merger", *of_middle_layers):
        weights |= {f"{merger}.norm": (hidden if merger == "merger" else merged,)}
        weights |= {f"{merger}.linear_fc1": (merged, merged), f"{merger}.linear_fc2": (config.out_hidden_size, merged)}
    tensors = {}
    for name, shape in weights.items():
        tensors[f"{name}.weight"] = torch.empty(shape, dtype=dtype, device=device)
        if name != "pos_embed":
            tensors[f"{name}.bias"] = torch.empty(shape[0], dtype=dtype, device=device)
    return tensors


class Norm:
    """Layer norm over the last dimension."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self.weight, self.bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalise each row."""
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, NORM_EPS)


def linear(tensors: Mapping[str, Tensor], name: str) -> PlainLinear:
    """Return the linear layer of this name; the weight is a view, so that the layer follows what is written there."""
    return PlainLinear(tensors[f"{name}.weight"].flatten(1), tensors[f"{name}.bias"])


class Block:
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, config: PreTrainedConfig, tensors: Mapping[str, Tensor], name: str) -> None:
        self.norm1, self.norm2 = Norm(tensors, f"{name}.norm1"), Norm(tensors, f"{name}.norm2")
        self.qkv, self.proj = linear(tensors, f"{name}.attn.qkv"), linear(tensors, f"{name}.attn.proj")
        self.fc1, self.fc2 = linear(tensors, f"{name}.mlp.linear_fc1"), linear(tensors, f"{name}.mlp.linear_fc2")
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.hidden_act]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the next hidden states, `[patches, hidden_size]` as the input."""
        hidden = hidden + self._attention(self.norm1(hidden), cos, sin, grids)
        return hidden + self.fc2(self.activation(self.fc1(self.norm2(hidden))))

    def _attention(self, hidden: Tensor, cos: Tensor, sin: Tensor, grids: Sequence[Grid]) -> Tensor:
        query, key, value = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1).unbind(1)
        of_items = [
            part.split_with_sizes([math.prod(grid) for grid in grids])
            for part in (_rotated(query, cos, sin), _rotated(key, cos, sin), value)
        ]
        attended = []
        for grid, *parts in zip(grids, *of_items, strict=True):
            layers = [part.unflatten(0, (grid[0], -1)).transpose(1, 2) for part in parts]  # [time, heads, patches, dim]
            attended.append(functional.scaled_dot_product_attention(*layers).transpose(1, 2).flatten(2).flatten(0, 1))
        return self.proj(torch.cat(attended))


class Merger:
    """Makes one token's vector of the patches of a block: `[patches, hidden_size]` to `[tokens, out_hidden_size]`."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self.norm = Norm(tensors, f"{name}.norm")
        self.fc1, self.fc2 = linear(tensors, f"{name}.linear_fc1"), linear(tensors, f"{name}.linear_fc2")
        self.in_features = self.fc1.weight.shape[1]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Merge. The size of the norm's weight tells what is normed: a patch, or all patches of a block (DeepStack)."""
        normed = self.norm(hidden.reshape(-1, self.norm.weight.numel()))
        return self.fc2(functional.gelu(self.fc1(normed.reshape(-1, self.in_features))))


class VisionNetwork:
    """The network over the tensors of `allocate`. It keeps views of them, and no copies."""

    def __init__(self, config: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> None:
        self.merge_size = config.spatial_merge_size
        self.patch_embed, self.pos_embed = linear(tensors, "patch_embed.proj"), tensors["pos_embed.weight"]
        self.blocks = [Block(config, tensors, f"blocks.{index}") for index in range(config.depth)]
        self.merger = Merger(tensors, "merger")
        self.deepstack = {
            layer: Merger(tensors, f"deepstack_merger_list.{index}")
            for index, layer in enumerate(config.deepstack_visual_indexes)
        }
        """By the layer after which it merges."""
        quarter = torch.arange(config.hidden_size // config.num_heads // 4, device=self.pos_embed.device)
        self.inv_freq = config.rope_parameters["rope_theta"] ** -(quarter / len(quarter))

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Run the network over patches `[num_patches, patch_dim]`, those of each item of `grids` after another.

        Returns `[num_tokens, out_hidden_size]` of the last layer, then of each middle layer that has a merger.
        """
        places = [self._places(height, width) for _, height, width in grids]
        hidden = self.patch_embed(pixels)
        hidden = hidden + torch.cat([self._learned(*grid, at) for grid, at in zip(grids, places, strict=True)])
        angles = torch.cat([at.repeat(grid[0], 1) for grid, at in zip(grids, places, strict=True)])
        angles = (angles[:, :, None] * self.inv_freq).flatten(1)[:, None]  # [patches, 1, half a head]
        cos, sin = angles.cos(), angles.sin()
        of_middle_layers = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin, grids)
            if index in self.deepstack:
                of_middle_layers.append(self.deepstack[index](hidden))
        return [self.merger(hidden), *of_middle_layers]

    def _places(self, height: int, width: int) -> Tensor:
        """Return row and column of each patch of an image, block by block: `[height * width, 2]`."""
        places = torch.cartesian_prod(
            torch.arange(height, device=self.pos_embed.device), torch.arange(width, device=self.pos_embed.device)
        )
        merge = self.merge_size
        blocks = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
        return blocks.reshape(-1, 2)

    def _learned(self, time: int, height: int, width: int, places: Tensor) -> Tensor:
        """Return the learned vectors of an item's patches: the square table, resized to its rows and columns."""
        side = math.isqrt(len(self.pos_embed))
        table = self.pos_embed[: side * side].float().T.reshape(1, -1, side, side)
        resized = functional.interpolate(table, size=(height, width), mode="bilinear", align_corners=True)
        vectors = resized[0].flatten(1).T[places[:, 0] * width + places[:, 1]]
        return vectors.to(self.pos_embed.dtype).repeat(time, 1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of values by its angle, in float32. `heads`: `[patches, heads, head_dim]`."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
