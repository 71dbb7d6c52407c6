"""Load a model: a local Hugging Face directory or a hub id of a supported architecture.

transformers builds the network and reads the weights. This file checks the files, and turns every loading failure into
a `ModelLoadError` of one clear sentence. Remote code is never run, and only safetensors are read: a pickle file can run
any program when it is opened. `describe` reads everything but the weights, for loaders with their own network (m3, m6),
also of other architectures. vLLM: `model_executor/model_loader`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from m1_single_request.config import DEFAULT_MODEL, ModelConfig
from m1_single_request.errors import LONGEST_REASON, ConfigError, ModelLoadError, shown, shown_path
from m1_single_request.field_rules import valid
from m1_single_request.precision import choose_dtype, count_weights, named_dtype

LONGEST_ID = 96  # characters of a hub id; the hub has none longer
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
LARGEST_SIZE = 2**48  # of a field; larger sizes overflow in C code before the memory check rejects them
LARGEST_NUM_LAYERS = 10_000  # each layer is a list of Python objects before any tensor takes memory
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model without its weights: the properties that the engine needs."""

    name: str
    architecture: str
    """The first of config.json's `architectures`, one of those passed to `describe`."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    """The precision of weights and KV when loaded."""
    named_dtype: torch.dtype
    """The precision that config.json names."""
    eos_token_ids: frozenset[int]
    """The end-of-sequence ids of config, generation config and tokenizer together."""
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; the tokenizer may have fewer tokens."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        config = self.config.get_text_config()
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)
        return int(values * self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelDescription):
    """A model with its weights."""

    model: Any
    num_parameters: int
    """Number of parameters as loaded; tied embeddings count once."""
    weight_bytes: int
    """Size of the parameters, in bytes."""


def head_dim(config: PreTrainedConfig) -> int:
    """Return the size of one attention head's vectors; older configs do not name it, then it is derived."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model and the tokenizer of `config`. Raises `ModelLoadError` or `ConfigError`, with a remedy."""
    described = describe(config, SUPPORTED_ARCHITECTURES)
    name = described.name
    check_weight_files(name)
    model, report = load_part(
        name,
        "its weights",
        lambda: AutoModelForCausalLM.from_pretrained(
            name,
            dtype=described.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",  # never the config's choice, which may name code on the hub
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported; `check_tensors` rejects them
        ),
    )
    misshapen = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    check_tensors(name, report["missing_keys"], report["unexpected_keys"], misshapen)
    load_part(name, "its weights", lambda: _check_stored_types(name, model.state_dict().keys()))
    model.config.return_dict = True  # the runner reads outputs by name; the config may disable that
    parameters = list(model.parameters())
    return LoadedModel(
        **vars(described),
        model=model.to(described.device).eval(),
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.nbytes for p in parameters),
    )


def describe(choice: ModelConfig, architectures: Sequence[str]) -> ModelDescription:
    """Read and check everything but the weights of a model.

    `architectures` are those that the caller can build. A vision-language config has a part for its language model:
    positions and vocabulary are read from that part, end-of-sequence ids from both.
    """
    name = str(DEFAULT_MODEL if choice.model is None else choice.model)
    _check_directory(name)
    config = load_part(name, "its config", lambda: _read_config(name))
    named = getattr(config, "architectures", None)
    architecture = named[0] if isinstance(named, list) and named else "none"
    if architecture not in architectures:
        known = ", ".join(architectures)
        raise ModelLoadError(f"{name}: architecture {shown(architecture)} is not supported; supported are {known}")
    text = _text_config(name, config)
    limit = text.max_position_embeddings
    max_model_len = choice.max_model_len or limit
    if max_model_len > limit:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {limit} positions of {name}")
    generation = _generation_config(name)
    tokenizer = load_part(name, "its tokenizer", lambda: AutoTokenizer.from_pretrained(name, trust_remote_code=False))
    eos = _eos_token_ids(config, text, generation, tokenizer)
    named, device = named_dtype(config, text), choice.torch_device()
    return ModelDescription(
        name=name,
        architecture=architecture,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(i for i in eos if 0 <= i < text.vocab_size),  # others are never sampled
        max_model_len=max_model_len,
        device=device,
        dtype=choose_dtype(choice.dtype, named, count_weights(config), device),
        named_dtype=named,
    )


def load_part(name: str, part: str, call: Callable[[], Any]) -> Any:
    """Return `call()`; an exception of a library becomes a `ModelLoadError` that names the model and the part."""
    had_bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()  # the trace and our errors report everything
    hf_logging.set_verbosity_error()
    try:
        return call()
    except ModelLoadError:  # its message is already clear
        raise
    except Exception as error:  # transformers, tokenizers, safetensors and the hub each raise families of their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        where, to_do = "", "check its files, or get them again"
        if not Path(name).is_dir():
            where = " (no such local directory, so it was taken for a hub id)"
            to_do = "check the id and the connection, or give a local directory"
        reason = reason.rstrip(".") if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
        raise ModelLoadError(f"{name}{where}: {part} cannot be loaded: {reason}; {to_do}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()


def check_tensors(name: str, missing: Iterable[str], unexpected: Iterable[str], misshapen: Iterable[str]) -> None:
    """Raise `ModelLoadError` if the tensors of the weight files do not match config.json."""
    for problem, tensors in (
        ("lack", sorted(missing)),
        ("have unexpected", sorted(unexpected)),
        ("have other shapes for", sorted(misshapen)),
    ):
        if tensors:
            more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            listed = ", ".join(tensors[:3]) + more
            raise ModelLoadError(f"{name}: the weights {problem} {listed}; the files do not fit config.json")


def check_stored_type(name: str, tensor: str, dtype: str) -> None:
    """Raise `ModelLoadError` for a tensor of a quantized or integer type: converted, its values are wrong."""
    if dtype not in FLOAT_TYPES:
        known = ", ".join(FLOAT_TYPES)
        raise ModelLoadError(f"{name}: {tensor} is stored as {dtype}, not as {known}: give the original weights")


def _check_stored_types(name: str, keys: Collection[str]) -> None:
    """Check the stored type of every tensor that the model uses: transformers converts all types silently."""
    directory = Path(str(cached_file(name, "config.json"))).parent
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dictionary
                if key in keys:
                    check_stored_type(name, key, tensors.get_slice(key).get_dtype())


def check_weight_files(name: str) -> None:
    """Raise `ModelLoadError` for a directory without weights in safetensors files."""
    if Path(name).is_dir() and not any(file.is_file() for file in Path(name).glob("*.safetensors")):
        raise ModelLoadError(
            f"{name} has no .safetensors file; only those are read: write them with transformers' save_pretrained"
        )


def _check_directory(name: str) -> None:
    path = Path(name)
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # too long for a file name, or not a name at all
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"{shown_path(name)} is neither a directory nor a hub id: {why}") from error
    if is_directory:
        if not (path / "config.json").exists():
            raise ModelLoadError(f"{name} has no config.json: is it a Hugging Face model directory?")
        if (path / "adapter_config.json").exists():
            raise ModelLoadError(f"{name} is an adapter (adapter_config.json): merge it into its base model first")
        if not (path / "tokenizer.json").exists() and not (path / "tokenizer_config.json").exists():
            raise ModelLoadError(f"{name} has no tokenizer.json: the tokenizer's files are missing")
    elif is_there:
        raise ModelLoadError(f"{name} is a file: give the directory that holds config.json and model.safetensors")
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or len(name) > LONGEST_ID:
        given = name if len(name) <= LONGEST_ID else shown_path(name)
        raise ModelLoadError(f"{given} does not exist: give a model directory, or a hub id such as Qwen/Qwen3-0.6B")


def _read_config(name: str) -> PreTrainedConfig:
    """Read config.json. Checks the number of layers first: transformers makes a list that long before any check."""
    stored, _ = PreTrainedConfig.get_config_dict(name)
    for part in (stored, stored.get("text_config")):
        if isinstance(part, dict) and isinstance(num_layers := part.get("num_hidden_layers"), int):
            check_size(name, "num_hidden_layers", num_layers, high=LARGEST_NUM_LAYERS)
    config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return config


def _text_config(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that describes the language model; the whole config if the model is text-only."""
    text = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        given = f"model_type={shown(config.model_type)} and text_config={shown(text)}"
        raise ModelLoadError(f"{name}: config.json has {given}, which do not go together")
    for field in SIZES:
        check_size(name, field, getattr(text, field, None))
    if getattr(text, "head_dim", None) is not None:
        check_size(name, "head_dim", text.head_dim)
    check_size(name, "num_hidden_layers", getattr(text, "num_hidden_layers", None), high=LARGEST_NUM_LAYERS)
    check_size(name, "max_position_embeddings", getattr(text, "max_position_embeddings", None), low=2)
    return text


def check_size(name: str, field: str, value: Any, *, low: int = 1, high: int = LARGEST_SIZE) -> None:
    """Raise `ModelLoadError` unless a field of config.json is a whole number from `low` to `high`."""
    valid(f"{name}: in config.json, {field}", value, Annotated[int, Meta(ge=low, le=high)], ModelLoadError)


def _generation_config(name: str) -> GenerationConfig | None:
    """Read generation_config.json, or return None. The model's loader would ignore a broken file and its EOS ids."""
    try:
        cached_file(name, "generation_config.json")
    except OSError:  # many models have none; a connection error would have failed at config.json
        return None
    config: GenerationConfig = load_part(name, "its generation config", lambda: GenerationConfig.from_pretrained(name))
    return config


def _eos_token_ids(*named_by: PreTrainedConfig | GenerationConfig | PreTrainedTokenizerBase | None) -> frozenset[int]:
    ids: set[int] = set()
    for value in (getattr(named, "eos_token_id", None) for named in named_by):
        several = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in several):
            raise ModelLoadError(
                f"eos_token_id={shown(value)} must be a token id or a list of them; correct the config"
            )
        ids.update(several)
    return frozenset(ids)
