"""Load a model into the engine's own decoder: a local Hugging Face directory or hub id of a supported architecture.

In m1 transformers built the network. Here transformers reads only config and tokenizer, through m1's `describe` with
all its checks. The network is ours, and its weights come from the safetensors files or, for benchmarks without files,
from a seed. vLLM: `model_executor/model_loader` (`DefaultModelLoader`, `DummyModelLoader`); SGLang the same.
"""

import math
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from m1_single_request.errors import ConfigError, ModelLoadError
from m1_single_request.model_loader import (
    SUPPORTED_ARCHITECTURES,
    LoadedModel,
    ModelDescription,
    check_weight_files,
    describe,
    load_part,
)
from m1_single_request.precision import count_weights
from m1_single_request.trace_event import size
from m2_continuous_batching.memory import available_memory
from m3_paged_attention.attention.registry import Backend, resolve
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.int8_weight import GROUP_SIZE
from m3_paged_attention.models.architecture import MODEL_TYPES, DecoderConfig, decoder_config
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.weights import (
    WEIGHT_FILES,
    DecoderWeights,
    allocate,
    dummy_weights,
    load_weights,
    read_headers,
)

MAX_POSITIONS = 2**24


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model and the tokenizer of `config`. Raises `ModelLoadError` or `ConfigError`, with a remedy."""
    backend = backend_of(config)
    return load_described(config, describe(config, SUPPORTED_ARCHITECTURES), backend)


def backend_of(config: ModelConfig) -> Backend:
    """Build the backend of `config`. Raises `ConfigError` if it cannot run here, or not with the quantization."""
    backend = resolve(config.attention_backend, config.torch_device())
    if config.quantization is not None and backend.name == "triton":
        raise ConfigError(
            f"quantization={config.quantization!r} has no kernels in the backend triton, which "
            f"attention_backend={config.attention_backend!r} selects on {config.torch_device()}: leave it out, or use "
            f"attention_backend='torch', which saves memory and is slower"
        )
    return backend


def load_described(config: ModelConfig, described: ModelDescription, backend: Backend) -> LoadedModel:
    """Load the weights of a model whose other files were read by `describe`."""
    check_positions(described)
    architecture = described.architecture
    shape = decoder_config(described.name, architecture, described.config, model_type=MODEL_TYPES[architecture])
    backend.check_head_dim(shape.head_dim)
    check_room(described, needed_bytes(config, described, shape))
    weights = load_part(described.name, "its weights", lambda: _weights(config, described, shape))
    weight_bytes = sum(weight.nbytes for weight in weights.tensors())
    return LoadedModel(
        **vars(described),
        model=Decoder(shape, weights, backend, max_model_len=described.max_model_len),
        num_parameters=count_parameters(shape, described.dtype),
        weight_bytes=weight_bytes,
    )


def count_parameters(shape: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the number of weights of a decoder; an output layer that is the embedding is not counted again."""
    return sum(math.prod(weight.shape) for weight in allocate(shape, dtype, torch.device("meta")).tensors())


def needed_bytes(config: ModelConfig, described: ModelDescription, shape: DecoderConfig) -> int:
    """Estimate the bytes of a decoder's weights: of its matrices."""
    num_weights, itemsize = count_weights(described.config), described.dtype.itemsize
    if config.quantization is None:
        return num_weights * itemsize
    embedding = shape.vocab_size * shape.hidden_size  # beside it, an output layer of its own
    in_linears = num_weights - (0 if shape.tie_word_embeddings else embedding)
    return embedding * itemsize + in_linears + 4 * in_linears // GROUP_SIZE


def check_positions(described: ModelDescription) -> None:
    """Raise `ConfigError` if a table of rotary angles for all positions would not fit in memory."""
    if described.max_model_len > MAX_POSITIONS:
        raise ConfigError(
            f"{described.name} names {described.max_model_len:,} positions, and a table of their angles would not fit: "
            f"give a max_model_len of at most {MAX_POSITIONS:,}"
        )


def check_room(described: ModelDescription, needed: int) -> None:
    """Raise `ModelLoadError` if weights of `needed` bytes do not fit into the device's free memory, before they are
    read."""
    available = available_memory(described.device)
    if available is not None and needed > available:
        precision = str(described.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{described.name}: its weights cannot be loaded: they need {size(needed)} as {precision}, and "
            f"{size(available)} of {described.device} memory is available; use a smaller model, or a machine with more "
            f"memory"
        )


def _weights(config: ModelConfig, described: ModelDescription, shape: DecoderConfig) -> DecoderWeights:
    name, device, dtype = described.name, described.device, described.dtype
    is_int8 = config.quantization == "int8"
    if config.load_format == "dummy":
        return dummy_weights(shape, dtype, device, config.seed, is_int8=is_int8)
    headers = read_headers(name, weights_directory(name))
    return load_weights(name, headers, shape, dtype, device, is_int8=is_int8)


def weights_directory(name: str) -> Path:
    """Return the directory of a model's weights; for a hub id, download the needed files first."""
    check_weight_files(name)
    directory = Path(name)
    return directory if directory.is_dir() else Path(snapshot_download(name, allow_patterns=list(WEIGHT_FILES)))
