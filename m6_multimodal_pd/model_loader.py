"""Loads a model that sees, or any that only reads.

Since m3: `Qwen3VLForConditionalGeneration`, from a local Hugging Face directory or a hub id. Its language model is m3's
decoder under other names, its vision tower lies in the same files. What is not of this family is loaded by m3's loader,
as it stands. vLLM and SGLang: a registry from the architecture's name to a class that loads itself.
"""

from dataclasses import dataclass
from typing import Any

import torch

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
    """A model in place, with what the engine must know of it. `num_parameters` and `weight_bytes` count the tower."""

    vision: VisionTower | None = None
    """None: a text model."""
    media_tokens: MediaTokens | None = None
    """None: a text model."""


@dataclass(frozen=True)
class VisionFacts:
    """What intake must know of a vision tower that is elsewhere."""

    config: Any
    """The model's `vision_config`."""
    bytes_per_token: int
    """What keeping an encoded token takes."""


@dataclass(frozen=True)
class DescribedModel:
    """A model without its weights: what intake and the router must know of it."""

    name: str
    tokenizer: Any
    device: torch.device
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    vision: VisionFacts | None
    """None: a text model."""
    media_tokens: MediaTokens | None
    """None: a text model."""


def describe_model(config: ModelConfig) -> DescribedModel:
    """Read and check everything but the weights. Raises `ModelLoadError` or `ConfigError`, as `load_model` would."""
    described = describe(config, ALL_ARCHITECTURES)
    vision_facts, media_tokens = None, None
    vocab_size = described.config.get_text_config().vocab_size
    if described.architecture == qwen3_vl.ARCHITECTURE:
        language = vl_decoder_config(described.name, described.config)
        own = described.config.vision_config
        check_vision_config(described.name, own, language)
        width = (1 + language.num_deepstack) * own.out_hidden_size
        vision_facts, media_tokens = VisionFacts(own, width * described.dtype.itemsize), language.media_tokens
        vocab_size = language.decoder.vocab_size
    return DescribedModel(
        name=described.name,
        tokenizer=described.tokenizer,
        device=config.torch_device(),
        eos_token_ids=described.eos_token_ids,
        max_model_len=described.max_model_len,
        vocab_size=vocab_size,
        vision=vision_facts,
        media_tokens=media_tokens,
    )


def load_model(config: ModelConfig) -> LoadedModel:
    """Load model and tokenizer as `config` says. Raises `ModelLoadError` or `ConfigError` with what to do about it."""
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
    tower = VisionTower.load(name, directory, vision_config, dtype, device)  # first: if it does not fit, it was short
    return tower, load_weights(
        name, directory, language.decoder, dtype, device, prefix=qwen3_vl.PREFIX, not_ours=(vision.PREFIX,)
    )
