"""Rotary position embedding: which angle each pair of a head's values turns by, at every position.

Pair `i` of a head turns by `position * frequency[i]`. The families differ only in how the frequencies are stretched for
long texts, and in whether cosine and sine are scaled. Both tables are computed once, up to `max_model_len`, and a step
gathers its rows once for all layers; m1 and m2 left this to transformers. vLLM: `layers/rotary_embedding`, a class for
each type; SGLang the same.

`dynamic` (NTK) needs no formula here. transformers raises the base once a sequence is longer than
`max_position_embeddings`, and an engine serves none that is. vLLM instead stretches from the first token on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeConfig:
    """`rope_parameters` of a config.json, each value checked; what a type does not use keeps its default."""

    rope_type: str = "default"
    theta: float = 10_000.0
    """The base: pair `i` of `n` turns with frequency `theta ** (-i / n)`."""
    factor: float = 1.0
    """How many times longer the context was made."""
    original_max_position_embeddings: int = 0
    """llama3, yarn: the context before it was made longer."""
    low_freq_factor: float = 1.0
    """llama3: a wavelength longer than the original context divided by this is stretched."""
    high_freq_factor: float = 4.0
    """llama3: one shorter than the original context divided by this is kept."""
    beta_fast: float = 32.0
    """yarn: a pair with more turns than this in the original context is kept."""
    beta_slow: float = 1.0
    """yarn: one with fewer turns than this is stretched."""
    truncate: bool = True
    """yarn: whether the two borders are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn: cosine and sine are multiplied by this, so that attention stays as sharp over a longer context."""


class RotaryTable:
    """Cosine and sine of every position below `num_positions`, in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies(rope, head_dim))
        self.cos = (angles.cos() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]
        self.sin = (angles.sin() * rope.attention_factor).to(device)  # [num_positions, head_dim / 2]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of these positions `[num_tokens]`: cosine and sine, each `[num_tokens, head_dim / 2]`."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of every pair of a head's values: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return FREQUENCIES[rope.rope_type](rope, 1.0 / rope.theta**exponents)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """yarn's factor for a config that names none (Peng et al. 2023, section 3.4)."""

    def sharpness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)


def _unchanged(rope: RopeConfig, base: Tensor) -> Tensor:
    return base


def _linear(rope: RopeConfig, base: Tensor) -> Tensor:
    """All positions are pressed into the original context."""
    return base / rope.factor


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Fast pairs are kept, slow ones stretched, and between the two the share changes smoothly (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * base / (2 * math.pi)  # within the original context
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(base, base / rope.factor, share_kept.clamp(0.0, 1.0))


def _yarn(rope: RopeConfig, base: Tensor) -> Tensor:
    """The same idea, with the share linear in the number of the pair instead of in its frequency (Peng et al. 2023)."""
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
