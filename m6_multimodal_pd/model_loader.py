"""Model loader for models with and without a vision tower.

Since m3: Qwen3-VL and Qwen3-VL-MoE, from a local Hugging Face directory or a hub id. Their language model is m3's
decoder under other names, and its vision tower is in the same files. Other architectures are loaded by m3's loader.
vLLM and SGLang: a registry from the architecture's name to a class that loads itself.
"""

from dataclasses import dataclass

from m1_single_request.model_loader import (
    LoadedModel as LoadedTextModel,
    ModelDescription,
    load_part,
)
from m3_paged_attention.attention.registry import resolve
from m3_paged_attention.config import KVCacheDtype
from m3_paged_attention.model_loader import (
    check_model,
    check_room,
    count_parameters,
    describe_for_decoder,
    load_described,
    needed_bytes,
    packed_bytes,
    weights_directory,
)
from m3_paged_attention.models.architecture import MODEL_TYPES
from m3_paged_attention.models.weights import DecoderWeights, dummy_weights, load_weights, read_headers
from m6_multimodal_pd.config import ModelConfig
from m6_multimodal_pd.models import qwen3_vl, vision
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder, VLDecoderConfig, vl_decoder_config
from m6_multimodal_pd.models.vision import VisionTower, check_vision_config

ALL_ARCHITECTURES = (*MODEL_TYPES, *qwen3_vl.FAMILIES)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(LoadedTextModel):
    """A model with its weights. `num_parameters` and `weight_bytes` include the vision tower."""

    vision: VisionTower | None = None
    """None: a text model."""


def describe_model(config: ModelConfig) -> ModelDescription:
    """Read and check everything but the weights. Raises `ModelLoadError` or `ConfigError`, as `load_model` does."""
    described = describe_for_decoder(config, ALL_ARCHITECTURES)
    language_of(described)
    return described


def language_of(described: ModelDescription) -> VLDecoderConfig | None:
    """Return the language model of a vision-language model; None for a text model.

    Raises `ModelLoadError` if it is not supported, or the vision tower is not or does not fit.
    """
    if described.architecture not in qwen3_vl.FAMILIES:
        return None
    language = vl_decoder_config(described.name, described.architecture, described.config)
    check_vision_config(described.name, described.config.vision_config, language)
    return language


def load_model(config: ModelConfig, kv_cache_dtype: KVCacheDtype = "auto") -> LoadedModel:
    """Load model and tokenizer as m3 does. Raises `ModelLoadError` or `ConfigError` with advice."""
    backend = resolve(config.attention_backend, config.torch_device())
    described = describe_for_decoder(config, ALL_ARCHITECTURES)
    language = language_of(described)
    if language is None:
        return LoadedModel(**vars(load_described(config, kv_cache_dtype, described, backend)))
    name, shape, itemsize = described.name, language.decoder, described.dtype.itemsize
    kv_dtype = check_model(config, kv_cache_dtype, described, shape.head_dim, backend)
    needed = load_part(name, "its weights", lambda: needed_bytes(config, described, shape))
    of_tower = load_part(name, "its weights", lambda: vision.count_weights(described.config.vision_config))
    check_room(config, described, needed + of_tower * itemsize + packed_bytes(config, described, shape))

    def load() -> tuple[VisionTower, Qwen3VLDecoder]:
        tower, weights = _weights(config, described, language)
        model = Qwen3VLDecoder(language, weights, backend, max_model_len=described.max_model_len, kv_dtype=kv_dtype)
        return tower, model

    tower, model = load_part(name, "its weights", load)
    return LoadedModel(
        **vars(described),
        model=model,
        num_parameters=tower.num_parameters + count_parameters(shape, described.dtype),
        weight_bytes=tower.num_parameters * itemsize + needed,
        vision=tower,
    )


def _weights(
    config: ModelConfig, described: ModelDescription, language: VLDecoderConfig
) -> tuple[VisionTower, DecoderWeights]:
    device, dtype = described.device, described.dtype
    name, vision_config = described.name, described.config.vision_config
    if config.load_format == "dummy":
        tower = VisionTower.dummy(vision_config, dtype, device, config.seed)
        return tower, dummy_weights(language.decoder, dtype, device, config.seed, config.quantization)
    of_tower, of_decoder = vision.parted(read_headers(name, weights_directory(name)))
    tower = VisionTower.load(name, of_tower, vision_config, dtype, device)  # first: its errors are raised early
    return tower, load_weights(
        name, of_decoder, language.decoder, dtype, device, qwen3_vl.PREFIX, quantization=config.quantization
    )
