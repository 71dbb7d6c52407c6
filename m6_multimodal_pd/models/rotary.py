"""M-RoPE: positions on three axes, time, height and width, each of which turns its own pairs of a head's values.

A token of text stands at the same place on all three axes, and then this is m3's rotary embedding. A token of a picture
stands at its row and its column. The frequencies are dealt out in turn (T H W T H W ...), so that every axis has fast
and slow ones; what the sections of the config leave over belongs to time. The tables are m3's, for there is still one
angle per position and pair: only the row is looked up pair by pair. vLLM and SGLang: `MRotaryEmbedding` in
`layers/rotary_embedding`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ModelLoadError, shown
from m3_paged_attention.models.rotary import RotaryTable

TIME, HEIGHT, WIDTH = 0, 1, 2
DEFAULT_SECTION = (24, 20, 20)
"""What transformers takes for a config that names none: all 64 pairs of a head_dim of 128."""

Gather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Positions `[3, n]`, the tables `[num_positions, pairs]` of cosine and sine, the axis of every pair `[pairs]`: to the
rows `[n, pairs]` of both."""


class MRopeTable:
    """m3's table, read at positions of one axis or of three."""

    def __init__(self, table: RotaryTable, section: tuple[int, int, int], backend: str) -> None:
        """`section` as `mrope_section` returns it; `backend` is the name of the backend that computes the rest."""
        self.table = table
        axes = axes_of_pairs(section, table.cos.shape[1])
        self.axes = torch.tensor(axes, device=table.cos.device)  # int64 [head_dim / 2]
        self.gather = _gather_of(backend)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each float32 `[num_tokens, head_dim / 2]`, of these int64 positions.

        `[num_tokens]` for a step without pictures, which costs what it cost in m3; `[3, num_tokens]` for any other.
        """
        if positions.dim() == 1:
            return self.table(positions)
        return self.gather(positions, self.table.cos, self.table.sin, self.axes)


def mrope_section(name: str, rope_parameters: Mapping[str, Any], head_dim: int) -> tuple[int, int, int]:
    """How many pairs of a head turn with time, height and width.

    Raises `ModelLoadError`, with the model's `name`, for sections that do not share out all pairs of `head_dim`, and
    for a model that deals them out in another order.
    """
    if rope_parameters.get("mrope_interleaved", True) is not True:
        raise ModelLoadError(
            f"{name}: mrope_interleaved={shown(rope_parameters['mrope_interleaved'])} in rope_parameters: only "
            f"frequencies dealt out in turn are supported (Qwen3-VL); sections one after another are another model's "
            f"(Qwen2-VL)"
        )
    section, pairs = rope_parameters.get("mrope_section", DEFAULT_SECTION), head_dim // 2
    counts = section if isinstance(section, list | tuple) else ()
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        counts = ()
    if len(counts) != 3 or sum(counts) != pairs:
        raise ModelLoadError(
            f"{name}: mrope_section={shown(section)} must be three whole numbers, for time, height and width, that "
            f"add up to the {pairs} pairs of head_dim={head_dim}"
        )
    dealt = axes_of_pairs((counts[0], counts[1], counts[2]), pairs)
    if [dealt.count(axis) for axis in (TIME, HEIGHT, WIDTH)] != list(counts):
        raise ModelLoadError(
            f"{name}: mrope_section={shown(section)} cannot be dealt out in turn: every third of the {pairs} pairs is "
            f"height's or width's, at most {(pairs + 1) // 3} and {pairs // 3}"
        )
    return counts[0], counts[1], counts[2]


def axes_of_pairs(section: tuple[int, int, int], pairs: int) -> list[int]:
    """The axis of each of a head's `pairs`: T H W in turn, then T alone once height and width have had their share."""
    return [pair % 3 if pair < 3 * section[pair % 3] else TIME for pair in range(pairs)]


def gather_with_torch(positions: Tensor, cos: Tensor, sin: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """A `Gather` of tensor operations: each pair looks up the row of its own axis."""
    rows = positions.index_select(0, axes).t()  # [n, pairs]
    return cos.gather(0, rows), sin.gather(0, rows)


def _gather_of(backend: str) -> Gather:
    if backend != "triton":
        return gather_with_torch
    from m6_multimodal_pd.models.triton_mrope import gather_with_triton  # who does not run triton does not load it

    return gather_with_triton
