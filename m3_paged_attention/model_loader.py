"""Load a model into the engine's own decoder: a local Hugging Face directory or hub id of a supported architecture.

In m1 transformers built the network. Here transformers reads only config and tokenizer, through m1's `describe` with
all its checks. The network is ours, and its weights come from the safetensors files or, for benchmarks without files,
from a seed. vLLM: `model_executor/model_loader` (`DefaultModelLoader`, `DummyModelLoader`); SGLang the same.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from m1_single_request.errors import ConfigError, ModelLoadError
from m1_single_request.model_loader import (
    LoadedModel,
    ModelDescription,
    check_weight_files,
    describe,
    load_part,
)
from m1_single_request.precision import choose_dtype
from m1_single_request.trace_event import size
from m2_continuous_batching.memory import available_memory
from m3_paged_attention.attention.registry import Backend, resolve
from m3_paged_attention.config import KVCacheDtype, ModelConfig
from m3_paged_attention.kv_dtype import kv_dtype_of
from m3_paged_attention.models.architecture import MODEL_TYPES, DecoderConfig, decoder_config
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.experts_config import count_weights
from m3_paged_attention.models.weights import (
    WEIGHT_FILES,
    DecoderWeights,
    allocate,
    dummy_weights,
    load_weights,
    read_headers,
)

MAX_POSITIONS = 2**24


def load_model(config: ModelConfig, kv_cache_dtype: KVCacheDtype = "auto") -> LoadedModel:
    """Load the model and the tokenizer of `config`. `kv_cache_dtype`: format of its KV (`CacheConfig`).

    Raises `ModelLoadError` or `ConfigError`, with a remedy.
    """
    backend = resolve(config.attention_backend, config.torch_device())
    return load_described(config, kv_cache_dtype, describe_for_decoder(config, tuple(MODEL_TYPES)), backend)


def describe_for_decoder(config: ModelConfig, architectures: Sequence[str]) -> ModelDescription:
    """Return m1's description of a model. Its precision is chosen for the number of weights with all experts."""
    described = describe(config, architectures)
    num_weights = count_weights(described.name, described.config)
    dtype = choose_dtype(config.dtype, described.named_dtype, num_weights, described.device)
    return replace(described, dtype=dtype)


def load_described(
    config: ModelConfig, kv_cache_dtype: KVCacheDtype, described: ModelDescription, backend: Backend
) -> LoadedModel:
    """Load the weights of a model whose other files were read by `describe`."""
    name, architecture = described.name, described.architecture
    shape = decoder_config(name, architecture, described.config, model_type=MODEL_TYPES[architecture])
    kv_dtype = check_model(config, kv_cache_dtype, described, shape.head_dim, backend)
    needed = load_part(name, "its weights", lambda: needed_bytes(config, described, shape))
    check_room(config, described, needed + packed_bytes(config, described, shape))

    def load() -> Decoder:
        weights = _weights(config, described, shape)
        return Decoder(shape, weights, backend, max_model_len=described.max_model_len, kv_dtype=kv_dtype)

    return LoadedModel(
        **vars(described),
        model=load_part(name, "its weights", load),
        num_parameters=count_parameters(shape, described.dtype),
        weight_bytes=needed,
    )


def count_parameters(shape: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the number of weights of a decoder; an output layer that is the embedding is not counted again."""
    return sum(math.prod(weight.shape) for weight in allocate(shape, dtype, torch.device("meta")).tensors())


def needed_bytes(config: ModelConfig, described: ModelDescription, shape: DecoderConfig) -> int:
    """Return the bytes of a decoder's weights."""
    weights = allocate(shape, described.dtype, torch.device("meta"), config.quantization)
    return sum(weight.nbytes for weight in weights.tensors())


def packed_bytes(config: ModelConfig, described: ModelDescription, shape: DecoderConfig) -> int:
    """Return the bytes of the largest layer with experts, on a CPU: its backends pack layer by layer, and one is there
    twice. A layer without experts is too small to count."""
    if described.device.type != "cpu" or shape.experts is None:
        return 0
    layers = allocate(shape, described.dtype, torch.device("meta"), config.quantization).layers
    return max(sum(weight.nbytes for weight in vars(layer).values() if weight is not None) for layer in layers)


def check_model(
    config: ModelConfig,
    kv_cache_dtype: KVCacheDtype,
    described: ModelDescription,
    head_dim: int,
    backend: Backend,
) -> torch.dtype:
    """Return the format of the model's KV, before the weights are read.

    Raises `ConfigError` if model or backend do not support this format or the quantization, or if a table of rotary
    angles for all positions would not fit in memory.
    """
    kv_dtype = kv_dtype_of(kv_cache_dtype, described, head_dim)
    backend.check(described, head_dim, kv_dtype, config.quantization)
    if described.max_model_len > MAX_POSITIONS:
        raise ConfigError(
            f"{described.name} names {described.max_model_len:,} positions, and a table of their angles would not fit: "
            f"give a max_model_len of at most {MAX_POSITIONS:,}"
        )
    return kv_dtype


def check_room(config: ModelConfig, described: ModelDescription, needed: int) -> None:
    """Raise `ModelLoadError` if weights of `needed` bytes do not fit into the device's free memory, before they are
    read."""
    available = available_memory(described.device)
    if available is not None and needed > available:
        precision = str(described.dtype).removeprefix("torch.")
        formats = precision if config.quantization is None else f"{config.quantization} and {precision}"
        raise ModelLoadError(
            f"{described.name}: its weights cannot be loaded: they need {size(needed)} as {formats}, and "
            f"{size(available)} of {described.device} memory is available; use a smaller model, or a machine with more "
            f"memory"
        )


def _weights(config: ModelConfig, described: ModelDescription, shape: DecoderConfig) -> DecoderWeights:
    name, device, dtype = described.name, described.device, described.dtype
    if config.load_format == "dummy":
        return dummy_weights(shape, dtype, device, config.seed, config.quantization)
    headers = read_headers(name, weights_directory(name))
    return load_weights(name, headers, shape, dtype, device, quantization=config.quantization)


def weights_directory(name: str) -> Path:
    """Return the directory of a model's weights; for a hub id, download the needed files first."""
    check_weight_files(name)
    directory = Path(name)
    return directory if directory.is_dir() else Path(snapshot_download(name, allow_patterns=list(WEIGHT_FILES)))
