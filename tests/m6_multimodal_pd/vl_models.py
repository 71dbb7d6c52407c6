"""Random Qwen3-VL models, tiny, saved as real Hugging Face directories, and prompts with pictures for them.

As in `tests/equivalence/models.py`, large random weights keep logits apart, and nothing that could be forgotten is zero
or one.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from m1_single_request import DEFAULT_MODEL
from tests.equivalence.models import SPREAD

VISION_SPREAD = 0.15
PATCH, TEMPORAL_PATCH, MERGE = 4, 2, 2
PATCH_DIM = 3 * TEMPORAL_PATCH * PATCH**2
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": SPREAD,
    "bos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL_PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 2],
    "num_position_embeddings": 25,
    "initializer_range": VISION_SPREAD,
}
WIDE_HEADS: dict[str, Any] = {
    "head_dim": 128,
    "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [24, 20, 20], "rope_theta": 5_000_000.0},
}


EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
"""Of the text config, for a model with experts."""


def save_random_vl_model(
    directory: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any
) -> Path:
    """Save a random Qwen3-VL with the course's tokenizer in `directory`; returns it. With experts in `text`, it is a
    Qwen3-VL-MoE."""
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    named = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    # Deep copies: a config writes into what it is given.
    parts = copy.deepcopy({"text_config": TEXT | named | (text or {}), "vision_config": VISION | (vision or {})})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        has_experts = "num_experts" in parts["text_config"]
        config_class = Qwen3VLMoeConfig if has_experts else Qwen3VLConfig
        model_class = Qwen3VLMoeForConditionalGeneration if has_experts else Qwen3VLForConditionalGeneration
        model: Any = model_class(config_class(**parts, **{"tie_word_embeddings": True} | ids | top))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=SPREAD)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 61, 122]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def theirs(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model."""
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)


def picture(seed: int, grid: tuple[int, int, int]) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches as a processor would make them, between -1 and 1, and their grid."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(grid[0] * grid[1] * grid[2], PATCH_DIM, generator=generator) - 1, grid
