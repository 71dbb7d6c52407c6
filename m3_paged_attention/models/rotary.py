"""Rotary position embedding: the rotation angle of each pair of a head's values, at every position.

Pair `i` of a head is rotated by `position * frequency[i]`. The families differ only in how the frequencies are scaled
for long texts, and in whether cosine and sine are scaled. Both tables are computed once, up to `max_model_len`. A step
gathers its rows once for all layers. In m1 and m2 transformers did this. vLLM: `layers/rotary_embedding`, a class per
type; SGLang the same.

`dynamic` (NTK) needs no formula here: transformers raises the base only for a sequence longer than
`max_position_embeddings`, and the engine rejects such sequences. vLLM instead scales from the first token on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """`rope_parameters` of a config.json, with checked values; a value that the type does not use has its default."""

    rope_type: str = "default"
    theta: float = 10_000.0
    """The base: pair `i` of `n` has the frequency `theta ** (-i / n)`."""
    factor: float = 1.0
    """Extension factor of the context."""
    original_max_position_embeddings: int = 0
    """llama3, yarn: length of the context before the extension, in tokens."""
    low_freq_factor: float = 1.0
    """llama3: a pair whose wavelength exceeds the original context divided by this is stretched."""
    high_freq_factor: float = 4.0
    """llama3: a pair whose wavelength is below the original context divided by this is unchanged."""
    beta_fast: float = 32.0
    """yarn: a pair with more rotations than this in the original context is unchanged."""
    beta_slow: float = 1.0
    """yarn: a pair with fewer rotations than this in the original context is stretched."""
    truncate: bool = True
    """yarn: True if the two borders are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn: factor of cosine and sine, which keeps attention as sharp over a longer context."""


class RotaryTable:
    """Cosine and sine of every position below `num_positions`, in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies(rope, head_dim))
        self.cos = (angles.cos() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]
        self.sin = (angles.sin() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of `positions` `[num_tokens]`, each `[num_tokens, head_dim / 2]`."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the frequency of every pair of a head's values, in radians per position: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return FREQUENCIES[rope.rope_type](rope, 1.0 / rope.theta**exponents)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return yarn's attention factor for a config without one (Peng et al. 2023, section 3.4)."""

    def sharpness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)


def _unchanged(_rope: RopeConfig, base: Tensor) -> Tensor:
    return base


def _linear(rope: RopeConfig, base: Tensor) -> Tensor:
    """Scale all positions into the original context."""
    return base / rope.factor


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Keep fast pairs, stretch slow ones, and blend between the two by frequency (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)  # within the original context
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(base, base / rope.factor, share_kept.clamp(0.0, 1.0))


def _yarn(rope: RopeConfig, base: Tensor) -> Tensor:
    """Scale as `_llama3`, but blend linearly by the index of the pair, not by its frequency (Peng et al. 2023)."""
    pairs = len(base)

    def pair_with(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return pairs * math.log(wavelength / (2 * math.pi)) / math.log(rope.theta)

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    share_stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return _blend(base, base / rope.factor, 1.0 - share_stretched)


def _blend(kept: Tensor, stretched: Tensor, share_kept: Tensor) -> Tensor:
    return stretched * (1.0 - share_kept) + kept * share_kept


FREQUENCIES: dict[str, Callable[[RopeConfig, Tensor], Tensor]] = {
    "default": _unchanged,
    "linear": _linear,
    "dynamic": _unchanged,
    "llama3": _llama3,
    "yarn": _yarn,
}
