"""The decoder's weights: allocate them, and fill them from safetensors files or from a seed.

The files store Q, K and V separately; the decoder uses one tensor for all three. `places` maps every name in the files
to a part of one of our tensors. One loop then copies each tensor from the mapped file to its place and converts its
type, without a second copy in memory; a quantized weight (`int8_weight.py`) takes the place of a tensor. Names and
shapes are compared before any allocation. vLLM: `weight_loader` and `stacked_params_mapping`; SGLang the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m1_single_request.errors import ModelLoadError, shown
from m1_single_request.model_loader import check_stored_type, check_tensors
from m3_paged_attention.int8_weight import Int8Weight, Weight
from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.qwen3_moe import Layout, StackedExperts, layout_of, parts_of_experts

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "model-*.safetensors")
"""Patterns of the files in a hub repository that this module reads."""
PREFIX, HEAD = "model.", "lm_head.weight"
"""The prefix of all tensor names in the files, and the one name without it. A decoder that is part of a larger model
has a longer prefix."""
MODULES = {
    "input_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "o": ["self_attn.o_proj"],
    "post_attention_norm": ["post_attention_layernorm"],
    "router": ["mlp.gate"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
"""For a field of `LayerWeights`: the modules in the files whose rows, in this order, are its rows; not for experts."""
Place = Weight | StackedExperts
"""Memory that a tensor of the files is copied to."""
ROWS = 4096  # compared at a time, so that no second copy of the embedding is needed


@dataclass
class LayerWeights:
    """Weights of one layer, `[out_features, in_features]` as in the files; None for a tensor that the model lacks."""

    input_norm: Tensor  # [hidden_size]
    qkv: Weight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Weight  # [hidden_size, num_heads * head_dim]
    o_bias: Tensor | None
    post_attention_norm: Tensor  # [hidden_size]
    router: Tensor | None  # [num_experts, hidden_size]; with one, gate_up and down are those of all experts, in turn
    gate_up: Weight  # [2 * intermediate_size, hidden_size]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden_size, intermediate_size]
    down_bias: Tensor | None


@dataclass
class DecoderWeights:
    """All weights of a decoder."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden_size]
    head: Weight  # [vocab_size, hidden_size]; the embedding itself if they are tied and it is not quantized

    def tensors(self) -> Iterator[Weight]:
        """Yield every weight once."""
        yield self.embedding
        for layer in self.layers:
            yield from (tensor for tensor in vars(layer).values() if tensor is not None)
        yield self.norm
        if self.head is not self.embedding:
            yield self.head


class Header(NamedTuple):
    """Metadata of a tensor in a file, read without the tensor itself."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def dense(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised weight in the model's precision."""
    return torch.empty(out_features, in_features, dtype=dtype, device=device)


EMPTY: Mapping[str | None, Callable[[int, int, torch.dtype, torch.device], Weight]] = {
    None: dense,
    "int8": Int8Weight.empty,
}
"""`ModelConfig.quantization` -> function that allocates the weight of a linear layer."""


def allocate(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> DecoderWeights:
    """Allocate uninitialised weights; on the device `meta` they have shapes but use no memory.

    `quantization`: of the weights of the linear layers, but not the embedding: a step reads one row per token.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(out_features: int, in_features: int) -> Weight:
        return EMPTY[quantization](out_features, in_features, dtype, device)

    hidden, dim, experts = config.hidden_size, config.head_dim, config.experts
    query_features, qkv_features = config.num_heads * dim, (config.num_heads + 2 * config.num_kv_heads) * dim

    def layer(index: int) -> LayerWeights:
        count, inner, router = 1, config.intermediate_size, None
        if experts is not None and index in experts.layers:
            count, inner, router = experts.num_experts, experts.intermediate_size, empty(experts.num_experts, hidden)
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=linear(qkv_features, hidden),
            qkv_bias=empty(qkv_features) if config.qkv_bias else None,
            q_norm=empty(dim) if config.qk_norm else None,
            k_norm=empty(dim) if config.qk_norm else None,
            o=linear(hidden, query_features),
            o_bias=empty(hidden) if config.o_bias else None,
            post_attention_norm=empty(hidden),
            router=router,
            gate_up=linear(count * 2 * inner, hidden),
            gate_up_bias=empty(2 * inner) if config.mlp_bias else None,
            down=linear(count * hidden, inner),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    embedding = empty(config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        norm=empty(hidden),
        head=embedding if config.tie_word_embeddings and quantization is None else linear(config.vocab_size, hidden),
    )


def places(
    config: DecoderConfig, weights: DecoderWeights, prefix: str = PREFIX, layout: Layout = "single"
) -> dict[str, Place]:
    """Return the destination of each tensor: its name in the files -> a view of our tensors of the same shape."""
    targets: dict[str, Place] = {
        f"{prefix}embed_tokens.weight": weights.embedding,
        f"{prefix}norm.weight": weights.norm,
    }
    if not config.tie_word_embeddings:
        targets[HEAD] = weights.head
    for index, layer in enumerate(weights.layers):
        for field, tensor in vars(layer).items():
            if tensor is not None:
                targets |= parts_of(config, prefix, index, field, tensor, layout)
    return targets


def parts_of(
    config: DecoderConfig, prefix: str, index: int, field: str, tensor: Weight, layout: Layout
) -> dict[str, Place]:
    """Return the parts of a tensor of layer `index` by their names in the files. `field`: of `LayerWeights`."""
    layer, experts = f"{prefix}layers.{index}", config.experts
    if experts is not None and index in experts.layers and field in ("gate_up", "down"):
        return parts_of_experts(experts, f"{layer}.mlp", field, tensor, layout)
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_several = {"qkv": [query, key_value, key_value], "gate_up": [config.intermediate_size] * 2}
    name = field.removesuffix("_bias")
    kind = "weight" if name == field else "bias"
    rows: Sequence[Weight] = tensor.split_with_sizes(of_several.get(name, [len(tensor)]))
    return {f"{layer}.{module}.{kind}": part for module, part in zip(MODULES[name], rows, strict=True)}


def load_weights(
    name: str,
    headers: Mapping[str, Header],
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    prefix: str = PREFIX,
    *,
    quantization: str | None = None,
) -> DecoderWeights:
    """Load the decoder's weights from the files of `headers`. Raises `ModelLoadError` for a tensor that mismatches.

    In the files of a larger model the decoder's names begin with `prefix`; the other parts are not in `headers`.
    """
    check_decoder(name, headers, config, dtype, prefix)
    weights = allocate(config, dtype, device, quantization)
    fill(places(config, weights, prefix, layout_in(headers, config, prefix)), headers)
    return with_tied_head(weights, config)


def layout_in(headers: Mapping[str, Header], config: DecoderConfig, prefix: str) -> Layout:
    """Return how the files store experts, by those of the first sparse layer."""
    if config.experts is None:
        return "single"
    shapes = {name: header.shape for name, header in headers.items()}
    return layout_of(config.experts, config.hidden_size, shapes, f"{prefix}layers.{min(config.experts.layers)}.mlp")


def with_tied_head(weights: DecoderWeights, config: DecoderConfig) -> DecoderWeights:
    """Return the weights, with the embedding as the output layer if they are tied."""
    if config.tie_word_embeddings and weights.head is not weights.embedding:
        weights.head.copy_(weights.embedding)
    return weights


def check_decoder(
    name: str, headers: Mapping[str, Header], config: DecoderConfig, dtype: torch.dtype, prefix: str
) -> None:
    """Raise the errors of `load_weights`, which stand in the headers. Of the tensors themselves it reads the output
    layer alone, where it is stored although config.json ties it."""
    weights = allocate(config, dtype, torch.device("meta"))
    check_headers(name, headers, places(config, weights, prefix, layout_in(headers, config, prefix)))
    if config.tie_word_embeddings and HEAD in headers:
        _check_tied_head(name, headers, f"{prefix}embed_tokens.weight", dtype)


def fill(targets: Mapping[str, Place], headers: Mapping[str, Header]) -> None:
    """Copy the files' tensors to the tensors of the same name in `targets`, converted to the target's type."""
    for file in dict.fromkeys(header.file for header in headers.values()):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                if key in targets:
                    targets[key].copy_(tensors.get_tensor(key))


def dummy_weights(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int, quantization: str | None = None
) -> DecoderWeights:
    """Return random weights as before training; the same seed on the same device gives the same weights."""
    weights = allocate(config, dtype, device, quantization)
    draw(places(config, weights), config.initializer_range, torch.Generator(device).manual_seed(seed))
    return with_tied_head(weights, config)


def draw(tensors: Mapping[str, Place], spread: float, generator: torch.Generator) -> None:
    """Initialise every tensor as before training; `spread` is the standard deviation of the random values."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            exact = torch.empty(tensor.shape, dtype=tensor.dtype, device=generator.device)
            tensor.copy_(exact.normal_(0.0, spread, generator=generator))
        elif name.endswith(".bias"):
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1.0)  # a norm
        else:
            tensor.normal_(0.0, spread, generator=generator)


def weight_files(name: str, directory: Path) -> list[Path]:
    """Return the model's weight files. The directory may have other safetensors, such as a copy in another format."""
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.exists():
        raise ModelLoadError(f"{name} has neither {SINGLE_FILE} nor {INDEX_FILE}: get its weights again")
    try:
        named: Any = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(named.values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{name}: {INDEX_FILE} cannot be read: {shown(error)}; get it again") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelLoadError(f"{name}: {INDEX_FILE} names {shown(shard)}, which is no .safetensors file beside it")
        if not (directory / shard).is_file():
            raise ModelLoadError(f"{name}: {INDEX_FILE} names {shown(shard)}, which is missing; get the files again")
    return [directory / shard for shard in shards]


def read_headers(name: str, directory: Path) -> dict[str, Header]:
    """Return the headers of all tensors in a directory, by name. Raises `ModelLoadError` for damaged files."""
    headers: dict[str, Header] = {}
    for file in weight_files(name, directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                    if key in headers:
                        raise ModelLoadError(f"{name}: {key} is in both {headers[key].file.name} and {file.name}")
                    stored = tensors.get_slice(key)
                    headers[key] = Header(file, tuple(stored.get_shape()), stored.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{name}: its weights cannot be loaded: {file.name}: {error}; check its files, or get them again"
            ) from error
    return headers


def check_headers(name: str, headers: Mapping[str, Header], expected: Mapping[str, Place]) -> None:
    """Raise `ModelLoadError` unless the files have exactly the `expected` tensors, with the same shapes.

    Two kinds of additional tensors are allowed: old checkpoints store the rotary frequencies, which follow from
    config.json, and some tied ones store the output layer a second time.
    """
    unexpected = [
        key for key in headers.keys() - expected.keys() if not key.endswith("rotary_emb.inv_freq") and key != HEAD
    ]
    misshapen = [
        f"{key} {list(headers[key].shape)} instead of {list(tensor.shape)} in {headers[key].file.name}"
        for key, tensor in expected.items()
        if key in headers and headers[key].shape != tuple(tensor.shape)
    ]
    check_tensors(name, missing=expected.keys() - headers.keys(), unexpected=unexpected, misshapen=misshapen)
    for key in expected:
        check_stored_type(name, key, headers[key].dtype)


def _check_tied_head(name: str, headers: Mapping[str, Header], embedding: str, dtype: torch.dtype) -> None:
    """Raise `ModelLoadError` if a tied checkpoint stores an output layer that differs, as `dtype`, from `embedding`."""
    head, tied = headers[HEAD], headers[embedding]
    with safe_open(head.file, framework="pt") as head_file, safe_open(tied.file, framework="pt") as tied_file:
        ours, theirs = head_file.get_slice(HEAD), tied_file.get_slice(embedding)
        equal = head.shape == tied.shape and all(
            torch.equal(ours[start : start + ROWS].to(dtype), theirs[start : start + ROWS].to(dtype))
            for start in range(0, tied.shape[0], ROWS)
        )
    if not equal:
        raise ModelLoadError(
            f"{name}: {HEAD} and {embedding} differ, but config.json ties them: set tie_word_embeddings to false"
        )
