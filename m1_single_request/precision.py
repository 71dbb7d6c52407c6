"""Choose the precision of `dtype="auto"`, after config.json is read.

A decode step reads every weight once. Weights of half the bytes are nearly twice as fast if the processor multiplies
them without conversion. The loaders of all milestones call `choose_dtype`. vLLM: `_get_and_verify_dtype` in
`config/model.py`.
"""

import functools
from typing import Any

import torch
from transformers import PreTrainedConfig

from m1_single_request.config import DTYPES

SMALL_BYTES = 256 * 2**20
"""Smaller weights, in bytes, are converted to float32 on a CPU: they are read fast enough, and rounded less."""


def choose_dtype(requested: str, named: torch.dtype, num_weights: int, device: torch.device) -> torch.dtype:
    """Return the precision of weights and KV. `requested`: the user's `dtype`; `named`: that of config.json.

    `auto` on CUDA: the named one, but bfloat16 instead of float32. On a CPU: bfloat16 if it is named, the processor
    multiplies it, and the weights have more than `SMALL_BYTES`; else float32, also for float16.
    """
    if requested != "auto":
        return DTYPES[requested]
    if device.type == "cuda":
        return torch.bfloat16 if named == torch.float32 else named
    is_large = num_weights * named.itemsize > SMALL_BYTES
    is_fast = named == torch.bfloat16 and is_large and can_pack(named, device)
    return named if is_fast else torch.float32


def named_dtype(*configs: PreTrainedConfig) -> torch.dtype:
    """Return the first precision that these configurations name; float32 if there is none, or `DTYPES` lacks it."""
    named: list[Any] = [config.dtype for config in configs if config.dtype is not None]
    return named[0] if named and named[0] in DTYPES.values() else torch.float32


def count_weights(config: Any) -> int:
    """Estimate the number of weights of the language model: the matrices that its configuration describes."""
    text = config.get_text_config()  # the config itself if text is all there is
    hidden, heads = text.hidden_size, text.num_attention_heads
    dim = getattr(text, "head_dim", None) or hidden // heads
    attention = 2 * hidden * dim * (heads + text.num_key_value_heads)  # Q, K, V and O
    embeddings = text.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return int(embeddings + text.num_hidden_layers * (attention + 3 * hidden * text.intermediate_size))


@functools.cache
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN multiplies packed weights of this precision on `device` (m2 packs them).

    The operations are private to torch, and a build without oneDNN lacks them. Half precision needs a processor that
    supports it.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ones = torch.ones(16, 16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(ones, 1)
        torch.ops.mkldnn._linear_pointwise(ones[:1], packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True
