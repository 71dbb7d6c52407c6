"""Random models of every supported text architecture, tiny, saved as real Hugging Face directories.

Large random weights (standard deviation 0.3) keep the best two logits apart. Biases and the weights of norms are random
as well: a model that forgets one of them cannot give the same tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from m1_single_request import DEFAULT_MODEL

SPREAD = 0.3

ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24, "tie_word_embeddings": True}),
    # Qwen2 has biases on Q, K and V. Its embedding has more rows than the tokenizer has tokens, as real ones do.
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False, "vocab_size": 4256}),
    # As wide as the heads of real models, so that native kernels attend; with 16 and 24, as above, torch does it.
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 32}),
}


EXPERTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    # Two of five experts for a token; the second of three layers has one MLP.
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
}
"""From m3 on."""
MODELS = ["embedded", *ARCHITECTURES]


# Extra end-of-sequence ids: with so many of them a random model meets one now and then.
EVERY_61ST = tuple(range(0, 4000, 61))


def save_random_model(
    directory: Path, architecture: str, *, seed: int = 0, stop_ids: Sequence[int] = EVERY_61ST, **overrides: Any
) -> Path:
    """Save a random model of `architecture` with the course's tokenizer in `directory`; returns it.

    Its generation config names a list of end-of-sequence ids, as chat models do: the tokenizer's and `stop_ids`.
    """
    config_class, model_class, settings = (ARCHITECTURES | EXPERTS)[architecture]
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**common | settings | overrides))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=SPREAD)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stop_ids]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
