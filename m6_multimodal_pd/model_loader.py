"""Model loader for models with and without a vision tower.

Since m3: `Qwen3VLForConditionalGeneration`, from a local Hugging Face directory or a hub id. Its language model is m3's
decoder under other names, and its vision tower is in the same files. Other architectures are loaded by m3's loader.
vLLM and SGLang: a registry from the architecture's name to a class that loads itself.
"""

from dataclasses import dataclass
from typing import Any

from m1_single_request.model_loader import (
    SUPPORTED_ARCHITECTURES,
    LoadedModel as LoadedTextModel,
    ModelDescription,
    describe,
    load_part,
)
from m1_single_request.precision import count_weights
from m3_paged_attention.attention.registry import Backend, resolve
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.model_loader import check_positions, check_room, load_described, weights_directory
from m3_paged_attention.models.weights import DecoderWeights, dummy_weights, load_weights
from m6_multimodal_pd.models import qwen3_vl, vision
from m6_multimodal_pd.models.qwen3_vl import MediaTokens, Qwen3VLDecoder, VLDecoderConfig, vl_decoder_config
from m6_multimodal_pd.models.vision import VisionTower, check_vision_config

ALL_ARCHITECTURES = (*SUPPORTED_ARCHITECTURES, qwen3_vl.ARCHITECTURE)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(LoadedTextModel):
    """A model with its weights. `num_parameters` and `weight_bytes` include the vision tower."""

    vision: VisionTower | None = None
    """None: a text model."""
    media_tokens: MediaTokens | None = None
    """None: a text model."""


@dataclass(frozen=True)
class VisionFacts:
    """The properties of a vision tower that intake needs, without its weights."""

    config: Any
    """The model's `vision_config`."""
    bytes_per_token: int
    """Size of the embeddings of one token."""


@dataclass(frozen=True, kw_only=True)
class DescribedModel(ModelDescription):
    """A model without its weights, for intake and the router."""

    vision: VisionFacts | None = None
    """None: a text model."""
    media_tokens: MediaTokens | None = None
    """None: a text model."""


def describe_model(config: ModelConfig) -> DescribedModel:
    """Read and check everything but the weights. Raises `ModelLoadError` or `ConfigError`, as `load_model` does."""
    described = describe(config, ALL_ARCHITECTURES)
    if described.architecture != qwen3_vl.ARCHITECTURE:
        return DescribedModel(**vars(described))
    language, vision_config = vl_decoder_config(described.name, described.config), described.config.vision_config
    check_vision_config(described.name, vision_config, language)
    width = (1 + language.num_deepstack) * vision_config.out_hidden_size
    facts = VisionFacts(vision_config, width * described.dtype.itemsize)
    return DescribedModel(**vars(described), vision=facts, media_tokens=language.media_tokens)


def load_model(config: ModelConfig) -> LoadedModel:
    """Load model and tokenizer. Raises `ModelLoadError` or `ConfigError` with advice."""
    backend = resolve(config.attention_backend, config.torch_device())
    described = describe(config, ALL_ARCHITECTURES)
    if described.architecture == qwen3_vl.ARCHITECTURE:
        return _load_vl(config, described, backend)
    return LoadedModel(**vars(load_described(config, described, backend)))


def _load_vl(config: ModelConfig, described: ModelDescription, backend: Backend) -> LoadedModel:
    check_positions(described)
    language = vl_decoder_config(described.name, described.config)
    check_vision_config(described.name, described.config.vision_config, language)
    backend.check_head_dim(language.decoder.head_dim)
    of_tower = load_part(described.name, "its weights", lambda: vision.count_weights(described.config.vision_config))
    check_room(described, count_weights(described.config) + of_tower)
    tower, weights = load_part(described.name, "its weights", lambda: _weights(config, described, language))
    num_parameters = tower.num_parameters + sum(tensor.numel() for tensor in weights.tensors())
    return LoadedModel(
        **vars(described),
        model=Qwen3VLDecoder(language, weights, backend, max_model_len=described.max_model_len),
        num_parameters=num_parameters,
        weight_bytes=num_parameters * described.dtype.itemsize,
        vision=tower,
        media_tokens=language.media_tokens,
    )


def _weights(
    config: ModelConfig, described: ModelDescription, language: VLDecoderConfig
) -> tuple[VisionTower, DecoderWeights]:
    device, dtype = described.device, described.dtype
    name, vision_config = described.name, described.config.vision_config
    if config.load_format == "dummy":
        tower = VisionTower.dummy(vision_config, dtype, device, config.seed)
        return tower, dummy_weights(language.decoder, dtype, device, config.seed)
    directory = weights_directory(name)
    tower = VisionTower.load(name, directory, vision_config, dtype, device)  # first: an error of its files comes early
    return tower, load_weights(
        name, directory, language.decoder, dtype, device, prefix=qwen3_vl.PREFIX, not_ours=(vision.PREFIX,)
    )
