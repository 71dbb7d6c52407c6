"""Convert a config.json to a `DecoderConfig`: the sizes and options of one decoder for Qwen3, Qwen3-MoE, Qwen2, Llama.

The four families are the same network with a few options, and this file lists the options. Unsupported models are
rejected here, before the weights are read: other activations, sliding windows, unknown rope types. m1 and m2 run more
models, because they use transformers' own. vLLM: a file per family in `model_executor/models`; SGLang: `models`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from transformers import PreTrainedConfig

from m1_single_request.errors import LONGEST_REASON, ModelLoadError, shown
from m1_single_request.field_rules import valid
from m1_single_request.model_loader import check_size, head_dim
from m3_paged_attention.models.experts_config import ExpertsConfig, experts_config
from m3_paged_attention.models.rotary import ROPE_TYPES, RopeConfig, default_rope, scaled_rope

MODEL_TYPES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
"""Supported architectures, and the `model_type` of each."""
SILU_NAMES = ("silu", "swish")
Constant = Annotated[float, Meta(ge=0, le=1e18)]  # far above any real value; larger ones overflow float32
RopeNumber = Annotated[float, Meta(gt=0, le=1e18)]  # or C integers
ROPE_NUMBERS = (
    "rope_theta factor attention_factor original_max_position_embeddings low_freq_factor high_freq_factor "
    "beta_fast beta_slow mscale mscale_all_dim"
).split()
MAX_HEAD_DIM = 2**16


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and options of a decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Number of KV heads. Fewer than `num_heads` is grouped-query attention: several query heads read one KV head."""
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; the tokenizer may have fewer tokens."""
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if every head of Q and K is normalised before rotary embedding."""
    tie_word_embeddings: bool
    """True if the output layer is the embedding."""
    rope: RopeConfig
    experts: ExpertsConfig | None = None
    """None: no layer has experts."""
    initializer_range: float = 0.02
    """The standard deviation of `dummy` weights."""


def decoder_config(name: str, architecture: str, config: PreTrainedConfig, *, model_type: str) -> DecoderConfig:
    """Return the configuration of the decoder that `config` describes.

    Raises `ModelLoadError`, with the model's `name`, for an unsupported or invalid one. `model_type` is the required
    `model_type` of `config`; that of a text-only model is in `MODEL_TYPES`.
    """
    _check_supported(name, architecture, config, model_type)
    check_size(
        name, "head_dim", head_dim(config), high=MAX_HEAD_DIM
    )  # it may be derived; `describe` checked the others
    attention_bias = bool(getattr(config, "attention_bias", False))
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    decoder = DecoderConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=is_qwen2 or attention_bias,  # Qwen2 always has them; its config has no option
        o_bias=not is_qwen2 and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.mlp_bias),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        rope=_rope_config(name, config),
        experts=experts_config(name, config),
        initializer_range=config.initializer_range or 0.02,
    )
    _check_sizes(name, decoder)
    return decoder


def _check_supported(name: str, architecture: str, config: PreTrainedConfig, model_type: str) -> None:
    if config.model_type != model_type:
        raise ModelLoadError(
            f"{name}: config.json names the architecture {architecture} but model_type={shown(config.model_type)}: "
            f"one of the two is wrong"
        )
    check_not_quantized(name, config)
    if config.hidden_act not in SILU_NAMES:
        raise ModelLoadError(f"{name}: hidden_act={shown(config.hidden_act)} is not supported: use silu")
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if layer_types:
        raise ModelLoadError(
            f"{name}: layers of type {', '.join(sorted(map(str, layer_types)))} are not supported here: blocks store "
            f"the whole context; run the model with m1_single_request or m2_continuous_batching"
        )


def check_not_quantized(name: str, config: PreTrainedConfig) -> None:
    """Raise `ModelLoadError` if the weights are quantized."""
    if getattr(config, "quantization_config", None):
        raise ModelLoadError(f"{name} is quantized (quantization_config in config.json): give the original weights")


def _check_sizes(name: str, decoder: DecoderConfig) -> None:
    for field in ("rms_norm_eps", "initializer_range"):
        valid(f"{name}: in config.json, {field}", getattr(decoder, field), Constant, ModelLoadError)
    if decoder.num_heads % decoder.num_kv_heads:
        raise ModelLoadError(f"{name}: {decoder.num_heads} heads are not a multiple of {decoder.num_kv_heads} KV heads")
    if decoder.head_dim % 2:
        raise ModelLoadError(f"{name}: head_dim={decoder.head_dim} is odd, but rotary embedding needs pairs of values")


def _rope_config(name: str, config: PreTrainedConfig) -> RopeConfig:
    """Read `rope_parameters`. transformers has already converted the older `rope_theta` and `rope_scaling`."""
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    nested = [key for key, value in parameters.items() if isinstance(value, dict)]
    if nested:
        raise ModelLoadError(f"{name}: separate rope_parameters for {nested[0]} are not supported: give one for all")
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ModelLoadError(f"{name}: rope type {shown(rope_type)} is not supported; supported are {supported}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"{name}: partial_rotary_factor is not supported: these families rotate whole heads")
    for key in ROPE_NUMBERS:
        if parameters.get(key) is not None:
            valid(f"{name}: in rope_parameters, {key}", parameters[key], RopeNumber, ModelLoadError)
    if rope_type == "default":
        return default_rope(parameters.get("rope_theta") or 10_000.0, head_dim(config))
    try:
        return scaled_rope(rope_type, config)
    except (ArithmeticError, LookupError, ValueError) as error:  # a value is missing, or they do not go together
        given = shown(parameters, LONGEST_REASON)
        raise ModelLoadError(f"{name}: rope_parameters={given} in config.json cannot be used: {error!r}") from error
