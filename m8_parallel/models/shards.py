"""The part of a decoder's weights that a rank has, and reading it alone from the files.

A rank's decoder is m3's with fewer heads, a narrower MLP and the rows of fewer tokens: the same classes, built of a
smaller `DecoderConfig`. Only the values differ from rank to rank. So `Shard` finds for each tensor of the files the
slice that this rank keeps, and `safetensors` reads no more than that.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.experts_config import ExpertsConfig
from m3_paged_attention.models.qwen3_moe import Layout, StackedExperts
from m3_paged_attention.models.weights import (
    PREFIX,
    DecoderWeights,
    Header,
    Place,
    allocate,
    draw,
    layout_in,
    places,
    with_tied_head,
)
from m8_parallel.models.plan import Plan


def local_config(name: str, config: DecoderConfig, size: int, *, expert_parallel: bool = False) -> DecoderConfig:
    """Return the sizes of a rank's decoder. Raises `ConfigError` for sizes that cannot be cut into `size` parts.

    With fewer KV heads than ranks, several ranks have the same one.
    """
    if expert_parallel and config.experts is None:
        raise ConfigError(f"{name}: expert_parallel=True has no effect, because it has no experts")
    experts = config.experts
    widths = {"num_attention_heads": config.num_heads}
    if experts is None or len(experts.layers) < config.num_layers:
        widths["intermediate_size"] = config.intermediate_size
    if experts is not None and expert_parallel:
        widths["num_experts"] = experts.num_experts
    elif experts is not None:
        widths["moe_intermediate_size"] = experts.intermediate_size
    for field, width in widths.items():
        if width % size:
            raise ConfigError(f"{name}: {field}={width} cannot be cut into {size} equal parts")
    if max(config.num_kv_heads, size) % min(config.num_kv_heads, size):
        raise ConfigError(f"{name}: {config.num_kv_heads} KV heads cannot be shared by {size} ranks")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=-(-config.vocab_size // size),
        experts=None if experts is None else _local_experts(experts, size, expert_parallel),
    )


def _local_experts(experts: ExpertsConfig, size: int, expert_parallel: bool) -> ExpertsConfig:
    if expert_parallel:
        return replace(experts, num_experts=experts.num_experts // size)
    return replace(experts, intermediate_size=experts.intermediate_size // size)


@dataclass(frozen=True)
class Shard:
    """The part of a decoder that belongs to one rank."""

    config: DecoderConfig
    """The whole decoder."""
    local: DecoderConfig
    """The rank's."""
    plan: Plan
    rank: int
    size: int
    expert_parallel: bool = False

    @property
    def first_expert(self) -> int:
        """The first of this rank's experts; 0 if it has a part of each."""
        has_whole = self.expert_parallel and self.local.experts is not None
        return self.rank * self.local.experts.num_experts if has_whole else 0  # type: ignore[union-attr]

    def rows_of_vocabulary(self) -> range:
        """Return the tokens whose embedding this rank has."""
        first = self.rank * self.local.vocab_size
        return range(min(first, self.config.vocab_size), min(first + self.local.vocab_size, self.config.vocab_size))

    def slices_of(self, name: str, prefix: str, shape: tuple[int, ...], layout: Layout) -> tuple[int, list[slice]]:
        """Return what this rank keeps of the tensor `name` of this shape: in one dimension, the slices one after the
        other.

        `prefix`: of the decoder's names. A stacked tensor of experts has them in its first dimension, and gates and ups
        in one of the others, one behind the other: each of them is cut.
        """
        module = name_of_module(name.removeprefix(prefix))
        if module in ("embed_tokens", "lm_head"):
            rows = self.rows_of_vocabulary()
            return 0, [slice(rows.start, rows.stop)]
        cut = self.plan.cut_of(module)
        if re.search(r"\.experts\.\d+\.", module) and self.expert_parallel:
            cut = "none"  # a whole expert
        if cut == "none" or (cut == "rows" and name.endswith(".bias")):
            return 0, [slice(0, shape[0])]
        if module.endswith(("experts.gate_up_proj", "experts.down_proj")) and self.expert_parallel:
            return 0, [slice(self.first_expert, self.first_expert + self.local.experts.num_experts)]  # type: ignore[union-attr]
        if module.endswith(("experts.gate_up_proj", "experts.down_proj")):
            dimension = 1 if (cut == "columns") is (layout == "stacked") else 2
        else:
            dimension = 0 if cut == "columns" else 1
        num_parts, part = self.size, self.rank
        if module.endswith(("k_proj", "v_proj")) and self.config.num_kv_heads < self.size:
            num_parts = self.config.num_kv_heads
            part = self.rank * num_parts // self.size  # neighbours have the same head
        num_fused = 2 if module.endswith("gate_up_proj") else 1
        whole = shape[dimension] // num_fused
        each = whole // num_parts
        return dimension, [slice(n * whole + part * each, n * whole + (part + 1) * each) for n in range(num_fused)]

    def cut(self, stored: Any, name: str, prefix: str, layout: Layout) -> Tensor:
        """Return this rank's part of a tensor, or of a tensor in a file of which no more is read."""
        shape = tuple(stored.shape if isinstance(stored, Tensor) else stored.get_shape())
        dimension, slices = self.slices_of(name, prefix, shape, layout)
        before = (slice(None),) * dimension
        kept: list[Tensor] = [stored[(*before, each)] for each in slices]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dimension)

    def load(
        self,
        headers: Mapping[str, Header],
        dtype: torch.dtype,
        device: torch.device,
        prefix: str,
        quantization: str | None,
    ) -> DecoderWeights:
        """Read this rank's part of files whose headers were checked (`check_decoder`)."""
        weights = self.allocate(dtype, device, quantization)
        layout = layout_in(headers, self.config, prefix)
        targets = self._places(weights, prefix, layout)
        for file in dict.fromkeys(header.file for header in headers.values()):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                    if name in targets:
                        self.keep(name, targets[name], self.cut(tensors.get_slice(name), name, prefix, layout))
        return with_tied_head(weights, self.local)

    def dummy(self, dtype: torch.dtype, device: torch.device, seed: int, quantization: str | None) -> DecoderWeights:
        """Return this rank's part of the random weights that one process would have. Each tensor is drawn whole."""
        weights, generator = (
            self.allocate(dtype, device, quantization),
            torch.Generator(device).manual_seed(seed),
        )
        targets = self._places(weights, PREFIX, "single")
        for name, whole in places(
            self.config, allocate(self.config, dtype, torch.device("meta"), quantization)
        ).items():
            drawn = torch.empty(whole.shape, dtype=dtype, device=device)
            draw({name: drawn}, self.config.initializer_range, generator)
            if name in targets:
                self.keep(name, targets[name], self.cut(drawn, name, PREFIX, "single"))
        return with_tied_head(weights, self.local)

    def allocate(self, dtype: torch.dtype, device: torch.device, quantization: str | None) -> DecoderWeights:
        """Allocate this rank's weights."""
        weights = allocate(self.local, dtype, device, quantization)
        weights.embedding.zero_()  # the last rank may have rows of no token
        if self.config.experts is not None:
            for layer in weights.layers:
                if layer.router is not None:  # every rank chooses among all
                    layer.router = torch.empty(
                        self.config.experts.num_experts, self.config.hidden_size, dtype=dtype, device=device
                    )
        return weights

    def _places(self, weights: DecoderWeights, prefix: str, layout: Layout) -> dict[str, Place]:
        """Return the places of this rank's tensors by their names in the files."""
        found = places(self.local, weights, prefix, layout)
        return {self.name_in_files(name): place for name, place in found.items()}

    def name_in_files(self, name: str) -> str:
        """Return the name of a tensor in the files, where this rank's experts have other numbers."""
        return re.sub(r"(?<=\.experts\.)\d+", lambda number: str(int(number[0]) + self.first_expert), name)

    def keep(self, name: str, place: Place, part: Tensor) -> None:
        """Copy a part to its place."""
        of_tokens = name_of_module(name).endswith(("embed_tokens", "lm_head"))
        if of_tokens and not isinstance(place, StackedExperts) and len(part) < len(place):
            place, rest = place.split_with_sizes([len(part), len(place) - len(part)])  # of no token
            rest.copy_(torch.zeros(tuple(rest.shape), dtype=rest.dtype))
        if name.endswith(".bias") and self.rank and self.plan.cut_of(name_of_module(name)) == "rows":
            part = torch.zeros_like(part)  # one rank adds it; all of them would add it several times
        place.copy_(part)


def name_of_module(name: str) -> str:
    """Return the name of a tensor's module inside the decoder, such as `layers.3.mlp.down_proj`."""
    inside = name[name.index("layers.") :] if "layers." in name else name
    return inside.removesuffix(".weight").removesuffix(".bias")
