"""Weight loader: writes the weights of another checkpoint into the model that runs.

A model in training, for example, is served without a restart. Between two requests no KV is in use, so each tensor is
overwritten where it is. All addresses stay, so CUDA graphs and the tables of the one-call step stay valid. The
memory that is needed beside the model is that of one tensor; on a CPU, where layers may be packed, also that of one
weight unpacked and packed anew. There are two passes:

    check   everything but the tensors: config, tokenizer, headers. What does not fit is an error, and changes nothing
    load    one tensor after the other: read, converted, quantized if the model is, and packed where the backend
            multiplies a packed layout

If a file cannot be read to its end in the second pass, the weights of before are read again: requests never meet a
model of which a part is new. New in this milestone. SGLang: `update_weights_from_disk`; vLLM: `reload_weights`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m1_single_request.errors import EngineDeadError, EngineUsageError, ModelLoadError
from m1_single_request.model_loader import ModelDescription, load_part
from m3_paged_attention.attention.native_experts import ExpertPanels
from m3_paged_attention.attention.native_linear import NativeLinear
from m3_paged_attention.experts import StackedLinears
from m3_paged_attention.int8_weight import Int8Weight, Weight
from m3_paged_attention.linear import PackedLinear, PlainLinear, QuantizedLinear
from m3_paged_attention.model_loader import weights_directory
from m3_paged_attention.models.architecture import MODEL_TYPES, DecoderConfig, decoder_config
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.layers import MLP, Attention, DecoderLayer
from m3_paged_attention.models.qwen3_moe import Layout, SparseMLP
from m3_paged_attention.models.weights import (
    HEAD,
    PREFIX,
    DecoderWeights,
    allocate,
    check_decoder,
    dense,
    layout_in,
    parts_of,
    read_headers,
)
from m6_multimodal_pd.config import ModelConfig
from m6_multimodal_pd.model_loader import LoadedModel, describe_model, language_of, load_model
from m6_multimodal_pd.models import qwen3_vl, vision
from m6_multimodal_pd.tensor_files import TensorFiles

LINEAR_FIELDS = ("qkv", "o", "router", "gate_up", "down")
LINEARS = (PlainLinear, PackedLinear, QuantizedLinear, NativeLinear)
KNOWN = (DecoderLayer, Attention, MLP, SparseMLP, *LINEARS, Tensor, StackedLinears, ExpertPanels)
"""Classes, not their subclasses, of the parts that are overwritten."""


class Checkpoint(NamedTuple):
    """Weights that fit the model that runs."""

    model: str
    prefix: str
    """Prefix of the names of the decoder's tensors."""
    files: TensorFiles


class WeightLoader:
    """Overwrites the weights of the target model and its vision tower. A draft model stays: it only makes drafts."""

    def __init__(self, *, config: ModelConfig, loaded: LoadedModel, runner: Any, encoder: Any) -> None:
        """`loaded`: the engine's model, which `runner` and `encoder` have."""
        precision = str(loaded.dtype).removeprefix("torch.")
        model = absolute(config.model)
        self.config = replace(config, model=model, dtype=precision, max_model_len=loaded.max_model_len)  # as in use
        self.running = ModelDescription(
            **{field.name: getattr(loaded, field.name) for field in fields(ModelDescription)}
        )
        self.runner, self.encoder = runner, encoder

    @property
    def stored(self) -> DecoderConfig:
        """The decoder as files have it."""
        config: DecoderConfig = self.runner.model.config
        return config

    def check(self, model: str) -> Checkpoint:
        """Read all but the weights of `model`, a directory or a hub id, and return where they are.

        Raises `ModelLoadError` for a model that is not the running one in all but its weights, or whose files have
        other tensors, and `ConfigError` for one with fewer positions than the engine's `max_model_len`;
        `EngineUsageError` if the running model has weights that no file overwrites.
        """
        if self.config.load_format == "dummy":
            raise EngineUsageError("load_format='dummy' draws the weights of a model: files have no effect on them")
        for part in parts_with_weights(self.runner.model):
            if type(part) not in KNOWN:
                raise EngineUsageError(f"the model has a {type(part).__name__}, whose weights no file overwrites")
        described = describe_model(replace(self.config, model=model))
        running = fixed_values(self.running)
        for name, value in fixed_values(described).items():
            if value != running[name]:
                raise ModelLoadError(f"{model}: another {name} than that of the model that runs; start another engine")
        return load_part(model, "its weights", lambda: self._checkpoint(model))

    def load(self, checkpoint: Checkpoint, before_write: Callable[[str], object]) -> None:
        """Overwrite the weights by those of `checkpoint`, which `check` has returned.

        `before_write`: called with the name of the model whose files are read next. A file that changes between this
        call and the end of the reading is an error.
        Raises `ModelLoadError` if they cannot be read to their end; then the weights of before are read again, from the
        directory of that model as it is now. `EngineDeadError` if these cannot be read either.
        """
        before_write(checkpoint.model)
        try:
            self._write(checkpoint)
        except Exception as error:
            self._restore(checkpoint.model, before_write, error)
            raise ModelLoadError(
                f"{checkpoint.model}: reading its weights failed: {error}; {self.config.model} was loaded again"
            ) from error
        self.config = replace(self.config, model=checkpoint.model)

    def _restore(self, model: str, before_write: Callable[[str], object], error: Exception) -> None:
        """Load the weights of before again, because `error` was raised between those of `model`."""
        before = str(self.config.model)
        try:
            checkpoint = self.check(before)
            before_write(before)
            self._write(checkpoint)
        except Exception as another:
            raise EngineDeadError(
                f"reading the weights of {model} failed ({error}), and so did reading those of {before} again "
                f"({another}): the model has parts of both"
            ) from error

    def _checkpoint(self, model: str) -> Checkpoint:
        decoder, tower = self.runner.model, self.encoder.tower
        headers = of_decoder = read_headers(model, weights_directory(model))
        prefix = PREFIX
        if tower is not None:
            prefix, (of_tower, of_decoder) = qwen3_vl.PREFIX, vision.parted(headers)
            vision.check_tower(model, of_tower, tower.tensors)
        check_decoder(model, of_decoder, self.stored, decoder.dtype, prefix)
        return Checkpoint(model, prefix, TensorFiles(headers))

    @torch.inference_mode()
    def _write(self, checkpoint: Checkpoint) -> None:
        files, decoder, tower = checkpoint.files, self.runner.model, self.encoder.tower
        self._write_decoder(decoder, checkpoint)
        for name, tensor in ({} if tower is None else tower.tensors).items():
            files.copy(vision.PREFIX + name, tensor)
        files.check_unchanged()
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)  # steps run on streams of their own

    def _write_decoder(self, decoder: Decoder, checkpoint: Checkpoint) -> None:
        _, prefix, files = checkpoint
        layout = layout_in(files.headers, self.stored, prefix)
        shapes = allocate(decoder.config, decoder.dtype, torch.device("meta"), self.config.quantization)
        write_decoder(decoder, files, prefix, layout, shapes)


def absolute(model: str | Path | None) -> str:
    """Return a directory by its absolute path, for other processes and for a time when the current folder is another; a
    hub id as it is."""
    name = str(model)
    return os.path.abspath(name) if os.path.isdir(name) else name


def check_loader(parts: Mapping[str, Any]) -> None:
    """Raise `EngineUsageError` unless the model was loaded from its files as they are."""
    if parts["model_loader"] is not load_model:
        raise EngineUsageError(
            "the weights of a model that was loaded by a model_loader of your own cannot be exchanged: files are "
            "written into the running model, without that part; start another engine"
        )


def fixed_values(described: ModelDescription) -> dict[str, Any]:
    """Return what an engine has from a model besides its weights, by name: the tables of angles, for example."""
    language = language_of(described)
    if language is None:
        model_type = MODEL_TYPES[described.architecture]
        decoder = decoder_config(described.name, described.architecture, described.config, model_type=model_type)
    else:
        decoder = language.decoder
    return {
        "architecture": described.architecture,
        **{field: value for field, value in vars(decoder).items() if field != "initializer_range"},
        "layout of images": language and (language.mrope_section, language.num_deepstack, language.media_tokens),
        "vision_config": language and described.config.vision_config,
        "vocabulary": described.tokenizer.get_vocab(),
        "set of end-of-sequence ids": described.eos_token_ids,
    }


def parts_with_weights(model: Decoder) -> Iterator[Any]:
    """Yield the layers of a decoder and their parts, each before its own parts."""
    yield model.head
    for layer in model.layers:
        yield layer
        yield from (layer.attention, layer.mlp)
        yield from (place for field, place in places_in(layer).items() if field in LINEAR_FIELDS)


def write_decoder(model: Decoder, files: Any, prefix: str, layout: Layout, shapes: DecoderWeights) -> None:
    """Overwrite all weights of a decoder, of these `shapes`. `files`: `TensorFiles`, or what copies from them; in these
    the tensors are named `prefix`.., and `layout` is that of experts."""
    config = model.config
    files.copy(f"{prefix}embed_tokens.weight", model.embedding)
    files.copy(f"{prefix}norm.weight", model.norm)
    for index, (layer, of_layer) in enumerate(zip(model.layers, shapes.layers, strict=True)):
        places = places_in(layer)
        for field, shape in vars(of_layer).items():
            if shape is not None:
                with filled(places[field], shape) as tensor:
                    for name, part in parts_of(config, prefix, index, field, tensor, layout).items():
                        files.copy(name, part)
    with filled(model.head, shapes.head) as tensor:
        if config.tie_word_embeddings:
            tensor.copy_(model.embedding)
        else:
            files.copy(HEAD, tensor)


def places_in(layer: DecoderLayer) -> dict[str, Any]:
    """Return the place of each field of `LayerWeights`: the tensor, or the linear layer that has it."""
    attention, mlp = layer.attention, layer.mlp
    of_heads = (None, None) if attention.qk_norm is None else attention.qk_norm.split_with_sizes(attention.heads)
    linears: dict[str, Any] = {"qkv": attention.qkv_proj, "o": attention.o_proj}
    of_mlp: dict[str, Any] = {}
    if isinstance(mlp, SparseMLP):
        of_mlp = {"router": mlp.router, "gate_up": mlp.experts.gate_up, "down": mlp.experts.down}
    else:
        linears |= {"gate_up": mlp.gate_up_proj, "down": mlp.down_proj}
    return {
        "input_norm": layer.input_norm,
        "post_attention_norm": layer.post_attention_norm,
        "q_norm": of_heads[0],  # one row per head, all the same
        "k_norm": of_heads[1],
        **linears,
        **of_mlp,
        **{f"{name}_bias": linear.bias for name, linear in linears.items()},
    }


@contextmanager
def filled(place: Any, shape: Weight) -> Iterator[Weight]:
    """Yield the tensor to overwrite: the one at its place; for a packed layer one like `shape`, which it packs."""
    if isinstance(place, Tensor):
        yield place
    elif isinstance(place, PlainLinear | QuantizedLinear):
        yield place.weight
    else:
        empty = dense if isinstance(shape, Tensor) else Int8Weight.empty
        weight = empty(len(shape), shape.shape[1], shape.dtype, torch.device("cpu"))
        yield weight
        place.pack(weight)
