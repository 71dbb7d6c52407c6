"""The entries of a config.json about experts: their number, size and layers.

The names are those of transformers' config objects for Qwen3-MoE and Qwen3-VL-MoE: in the JSON some have others.
`qwen3_moe.py` explains experts.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from m1_single_request.errors import ModelLoadError, shown
from m1_single_request.model_loader import check_size
from m1_single_request.precision import count_weights as dense_count

MODEL_TYPES = ("qwen3_moe", "qwen3_vl_moe_text")
"""Those of text configs with experts; others may have entries of the same names."""
LARGEST_NUM_EXPERTS = 2**12
"""Eight times as many as any released model has: each has names, which are compared with those of the files."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model."""

    num_experts: int
    """Experts in a sparse layer."""
    top_k: int
    """Experts that a token uses."""
    intermediate_size: int
    """Width of an expert."""
    normalizes: bool
    """True if the weights of the chosen experts are scaled to a sum of 1."""
    layers: frozenset[int]
    """Indices of the sparse layers; the others have one MLP."""


def experts_config(name: str, config: PreTrainedConfig) -> ExpertsConfig | None:
    """Read the experts of a text config; None if it has no sparse layer. Raises `ModelLoadError`, with the model's
    `name`. Qwen3-VL-MoE always normalizes, and has no window, whatever other entries its config has.
    """
    if config.model_type not in MODEL_TYPES or not hasattr(config, "num_experts"):
        return None  # a config of two families is refused by its reader
    check_size(name, "num_experts", config.num_experts, low=0, high=LARGEST_NUM_EXPERTS)
    check_size(name, "decoder_sparse_step", config.decoder_sparse_step)
    is_text_model = config.model_type == "qwen3_moe"
    if is_text_model and getattr(config, "sliding_window", None) is not None:
        raise ModelLoadError(f"{name}: sliding_window={shown(config.sliding_window)} is not supported with experts")
    layers = frozenset(
        index
        for index in range(config.num_hidden_layers)
        if index not in config.mlp_only_layers
        and config.num_experts > 0
        and (index + 1) % config.decoder_sparse_step == 0
    )
    if not layers:
        return None
    check_size(name, "moe_intermediate_size", config.moe_intermediate_size)
    check_size(name, "num_experts_per_tok", config.num_experts_per_tok, high=config.num_experts)
    return ExpertsConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalizes=not is_text_model or bool(getattr(config, "norm_topk_prob", True)),
        layers=layers,
    )


def count_weights(name: str, config: Any) -> int:
    """Estimate the number of weights of the language model, as m1 does, with all experts. Raises `ModelLoadError`."""
    text = config.get_text_config()
    experts, num_weights = experts_config(name, text), dense_count(config)
    if experts is None:
        return num_weights
    more = experts.num_experts * experts.intermediate_size - text.intermediate_size
    return num_weights + len(experts.layers) * 3 * text.hidden_size * more
