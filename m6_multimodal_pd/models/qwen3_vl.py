"""The language model of Qwen3-VL and Qwen3-VL-MoE: m3's decoder, in which tokens may belong to images.

Since m3: the embedding of a token of an image is computed by the vision tower, its position has three axes (M-RoPE),
and features of the tower's middle layers are added to its hidden state after the first layers (DeepStack). Tokens of
text are computed as in m3. vLLM: `model_executor/models/qwen3_vl.py`; SGLang: `models/qwen3_vl.py`, from which the
layout of `VisualTokens` comes.
"""

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from m1_single_request.errors import ModelLoadError, shown
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.registry import Backend
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.architecture import DecoderConfig, check_not_quantized, decoder_config
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.weights import DecoderWeights
from m6_multimodal_pd.models.rotary import MRopeTable, mrope_section
from m6_multimodal_pd.multimodal.media_settings import MediaTokens

FAMILIES = {
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "Qwen3MoeForCausalLM"),
}
"""Supported architectures: the `model_type` of each, to which its text config adds `_text`, and the family of text
models that its decoder belongs to."""
PREFIX = "model.language_model."
"""Prefix of the names of the decoder's tensors, on the hub and in files of transformers."""


@dataclass(frozen=True, kw_only=True)
class VLDecoderConfig:
    """Shape of the language model, and its inputs from the vision tower."""

    decoder: DecoderConfig
    mrope_section: tuple[int, int, int]
    """Number of pairs of a head that are rotated by time, height and width."""
    num_deepstack: int
    """Number of the first layers after which DeepStack adds features."""
    media_tokens: MediaTokens

    @property
    def visual_width(self) -> int:
        """Number of values of an image token from the vision tower: its embedding and the features of DeepStack."""
        return (1 + self.num_deepstack) * self.decoder.hidden_size


@dataclass(frozen=True)
class VisualTokens:
    """Embeddings of the tokens of a step that belong to images."""

    places: Tensor
    """int64 `[num_visual]`: their indices among the step's tokens, each once."""
    embeddings: Tensor
    """`[num_visual, (1 + num_deepstack) * hidden_size]`, in the model's precision: the embedding, then the features to
    add after the first layer, after the second, ..."""


def vl_decoder_config(name: str, architecture: str, config: PreTrainedConfig) -> VLDecoderConfig:
    """Return the language model that a config of one of the `FAMILIES` describes. Raises `ModelLoadError`, with the
    model's `name`, for a config that is not supported."""
    own_type, family = FAMILIES[architecture]
    text_type = f"{own_type}_text"
    for part, model_type in ((None, own_type), ("text_config", text_type)):
        found = getattr(config if part is None else getattr(config, part), "model_type", None)
        if found != model_type:
            raise ModelLoadError(
                f"{name}: config.json names the architecture {architecture} but model_type={shown(found)} where it "
                f"must be {model_type!r}"
            )
    check_not_quantized(name, config)
    text = copy.copy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings  # the output layer belongs to the whole model
    decoder = decoder_config(name, family, text, model_type=text_type)
    return VLDecoderConfig(
        decoder=decoder,
        mrope_section=mrope_section(name, text.rope_parameters or {}, decoder.head_dim),
        num_deepstack=len(config.vision_config.deepstack_visual_indexes),
        media_tokens=_media_tokens(name, config, decoder.vocab_size),
    )


def _media_tokens(name: str, config: PreTrainedConfig, vocab_size: int) -> MediaTokens:
    found: dict[str, int] = {}
    for field in ("image", "video", "vision_start", "vision_end"):
        value = getattr(config, f"{field}_token_id")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise ModelLoadError(
                f"{name}: {field}_token_id={shown(value)} in config.json is no token: there are {vocab_size:,}"
            )
        if value in found.values():
            raise ModelLoadError(f"{name}: {field}_token_id={value} in config.json has another meaning already")
        found[field] = value
    return MediaTokens(**found)


class Qwen3VLDecoder(Decoder):
    """m3's decoder; its `forward` also takes the embeddings of images."""

    def __init__(self, config: VLDecoderConfig, weights: DecoderWeights, backend: Backend, **more: Any) -> None:
        """Take ownership of `weights`, as m3's decoder does. `more`: its other arguments."""
        super().__init__(config.decoder, weights, backend, **more)
        self.num_deepstack = config.num_deepstack
        self.mrope = MRopeTable(self.rotary, config.mrope_section, backend.name)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVStorage,
        metadata: AttentionMetadata,
        visual: VisualTokens | None = None,
    ) -> Tensor:
        """Return hidden states as in m3. `positions`: int64 `[num_tokens]` or, on three axes, `[3, num_tokens]`.

        The id of a token in `visual` is not used.
        """
        if visual is None:  # then positions have one axis
            return super().forward(input_ids, positions, kv, metadata)
        hidden = self.embed(input_ids.clamp(max=self.config.vocab_size - 1))
        embeddings, *deepstack = visual.embeddings.chunk(1 + self.num_deepstack, 1)  # [num_visual, hidden_size]
        hidden.index_copy_(0, visual.places, embeddings)
        cos, sin = self.mrope(positions)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, cos, sin, kv.layer(index), metadata)
            if index < len(deepstack):
                hidden.index_add_(0, visual.places, deepstack[index])
        return self.normed(hidden, residual)
