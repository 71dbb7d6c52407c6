"""Vision tower: from patches of images to one row per token of the prompt.

Its weights are read from the same safetensors as the decoder's, with the same checks, and all images of a step run in
one forward of the network, those of different requests together. vLLM: `Qwen3_VisionTransformer` in
`models/qwen3_vl.py`; SGLang: `Qwen3VLMoeVisionModel` in `models/qwen3_vl.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from m1_single_request.errors import ModelLoadError, shown
from m1_single_request.model_loader import check_size
from m3_paged_attention.models.weights import Header, check_headers, draw, fill
from m6_multimodal_pd.models.qwen3_vl import VLDecoderConfig
from m6_multimodal_pd.models.vision_network import ACTIVATIONS, Grid, VisionNetwork, allocate

PREFIX = "model.visual."
"""Prefix of the names of the tower's tensors, on the hub and in files of transformers."""
MODEL_TYPES = ("qwen3_vl_vision", "qwen3_vl_moe_vision")
SIZES = (
    "hidden_size intermediate_size num_heads in_channels patch_size temporal_patch_size spatial_merge_size "
    "out_hidden_size num_position_embeddings"
).split()
LARGEST_DEPTH = 10_000


class VisionTower:
    """Encodes images and videos. Made by `load` or `dummy`."""

    def __init__(self, config: PreTrainedConfig, tensors: dict[str, Tensor]) -> None:
        """`tensors`: those of `allocate`, in the tower's precision and on its device."""
        self.network, self.tensors = VisionNetwork(config, tensors), tensors
        self.device, self.dtype = self.network.pos_embed.device, self.network.pos_embed.dtype
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self.hidden_size: int = config.out_hidden_size
        """Hidden size of the language model."""
        self.num_deepstack = len(config.deepstack_visual_indexes)
        self.merge_size: int = config.spatial_merge_size
        """Patches along a side of the block that becomes one token."""
        self.patch_dim: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        """Number of values of a patch."""

    @property
    def width(self) -> int:
        """Number of values of a token's row: the embedding and the features of DeepStack."""
        return (1 + self.num_deepstack) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Size of a token's row, in bytes."""
        return self.width * self.dtype.itemsize

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image with these patches."""
        return math.prod(grid) // self.merge_size**2

    @classmethod
    def load(
        cls,
        name: str,
        headers: Mapping[str, Header],
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "VisionTower":
        """Fill the tower from the files of `headers`. Raises `ModelLoadError` for a tensor that does not fit."""
        check_tower(name, headers, allocate(config, dtype, torch.device("meta")))
        tensors = allocate(config, dtype, device)
        fill({PREFIX + key: tensor for key, tensor in tensors.items()}, headers)
        return cls(config, tensors)

    @classmethod
    def dummy(cls, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> "VisionTower":
        """Return a tower with random weights, the same for the same seed on the same device."""
        tensors = allocate(config, dtype, device)
        draw(tensors, config.initializer_range, torch.Generator(device).manual_seed(seed))
        return cls(config, tensors)

    @torch.inference_mode()
    def encode(self, items: Sequence[tuple[Tensor, Grid]]) -> list[Tensor]:
        """Run the tower once for all `items`, each the patches `[num_patches, patch_dim]` of an image and their grid.

        Returns for each `[num_tokens, (1 + num_deepstack) * hidden_size]`, the rows of `VisualTokens.embeddings`. Each
        has memory of its own, so that one can be kept while the others are freed.
        """
        if not items:
            return []
        pixels = torch.cat([patches.to(self.device, self.dtype) for patches, _ in items])
        counts = [self.num_tokens(grid) for _, grid in items]
        features = [part.split_with_sizes(counts) for part in self.network(pixels, [grid for _, grid in items])]
        return [torch.cat(parts, dim=1) for parts in zip(*features, strict=True)]


def parted(headers: Mapping[str, Header]) -> tuple[dict[str, Header], dict[str, Header]]:
    """Return the headers of the tower's tensors, and those of the language model's."""
    of_tower = {key: header for key, header in headers.items() if key.startswith(PREFIX)}
    return of_tower, {key: header for key, header in headers.items() if key not in of_tower}


def check_tower(name: str, headers: Mapping[str, Header], tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelLoadError` unless the files have the tower's `tensors`, with the same shapes, and no other ones."""
    check_headers(name, headers, {PREFIX + key: tensor for key, tensor in tensors.items()})


def count_weights(config: PreTrainedConfig) -> int:
    """Return the number of weights of the tower that `config` describes."""
    return sum(tensor.numel() for tensor in allocate(config, torch.float32, torch.device("meta")).values())


def check_vision_config(name: str, config: PreTrainedConfig, language: VLDecoderConfig) -> None:
    """Raise `ModelLoadError`, with the model's `name`, for a tower that cannot be built or does not fit `language`."""
    if config.model_type not in MODEL_TYPES:
        wanted = " or ".join(map(repr, MODEL_TYPES))
        raise ModelLoadError(f"{name}: vision_config has model_type={shown(config.model_type)}, not {wanted}")
    check_size(name, "vision_config.depth", config.depth, high=LARGEST_DEPTH)
    for field in SIZES:
        check_size(name, f"vision_config.{field}", getattr(config, field))
    if config.out_hidden_size != language.decoder.hidden_size:
        raise ModelLoadError(
            f"{name}: the vision tower's out_hidden_size={config.out_hidden_size} is not the language model's "
            f"hidden_size={language.decoder.hidden_size}"
        )
    if config.hidden_size % (4 * config.num_heads):
        raise ModelLoadError(
            f"{name}: vision_config.hidden_size={config.hidden_size} over {config.num_heads} heads: each must have a "
            f"multiple of 4 values, pairs that turn with the row and pairs that turn with the column"
        )
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ModelLoadError(f"{name}: vision_config.hidden_act={shown(config.hidden_act)} is not one of {known}")
    _check_deepstack(name, config, language.decoder.num_layers)


def _check_deepstack(name: str, config: PreTrainedConfig, num_layers: int) -> None:
    indexes: list[Any] = list(config.deepstack_visual_indexes)
    known = [i for i in indexes if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < config.depth]
    if len(known) != len(indexes) or len(set(known)) != len(known):
        raise ModelLoadError(
            f"{name}: deepstack_visual_indexes={shown(indexes)} must each be another layer of the vision tower, "
            f"0 to {config.depth - 1}"
        )
    if len(indexes) > num_layers:
        raise ModelLoadError(
            f"{name}: deepstack_visual_indexes={shown(indexes)} are more than the {num_layers} layers of the language "
            f"model, which takes one after each layer"
        )
