"""Rotary position embedding: the rotation angle of each pair of a head's values, at every position.

Pair `i` of a head is rotated by `position * frequency[i]`. The families differ only in how the frequencies are scaled
for long texts, and in whether cosine and sine are scaled: transformers computes both from `rope_parameters`. The tables
are computed once, up to `max_model_len`. A step gathers its rows once for all layers. In m1 and m2 transformers did
this. vLLM: `layers/rotary_embedding`, a class per type; SGLang the same.

`dynamic` (NTK) is as `default` here: transformers raises the base only for a sequence longer than
`max_position_embeddings`, and the engine rejects such sequences. vLLM instead scales from the first token on.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class RopeConfig(NamedTuple):
    """The frequencies of a model."""

    frequencies: tuple[float, ...]
    """Of each pair of a head's values, in radians per position."""
    attention_factor: float = 1.0
    """yarn: factor of cosine and sine, which keeps attention as sharp over a longer context."""


class RotaryTable:
    """Cosine and sine of every position below `num_positions`, in float32."""

    def __init__(self, rope: RopeConfig, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(rope.frequencies))
        self.cos = (angles.cos() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]
        self.sin = (angles.sin() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of `positions` `[num_tokens]`, each `[num_tokens, head_dim / 2]`."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def default_rope(theta: float, head_dim: int) -> RopeConfig:
    """Return the rotary embedding without scaling: pair `i` of `n` has the frequency `theta ** (-i / n)`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return RopeConfig(tuple((1.0 / theta**exponents).tolist()))


def scaled_rope(rope_type: str, config: Any) -> RopeConfig:
    """Return the rotary embedding of a type other than `default`. Raises what transformers does for wrong values."""
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return RopeConfig(tuple(frequencies.tolist()), attention_factor)
