"""M-RoPE: positions on three axes, time, height and width, each of which rotates its own pairs of a head's values.

A token of text has the same position on all three axes, and then this is m3's rotary embedding. A token of an image has
the positions of its row and its column. The pairs are assigned in turn (T H W T H W ...), so that every axis has fast
and slow ones; pairs that the sections of the config leave over belong to time. The tables are m3's, because there is
still one angle per position and pair: only the row is looked up for each pair. vLLM and SGLang: `MRotaryEmbedding` in
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
"""Default of transformers: all 64 pairs of a head_dim of 128."""

Gather = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from positions `[3, n]`, tables `[num_positions, pairs]` of cosine and sine, and the axis of each pair
`[pairs]`, to the rows `[n, pairs]` of both tables."""


class MRopeTable:
    """m3's table, read at positions of one axis or of three."""

    def __init__(self, table: RotaryTable, section: tuple[int, int, int], backend: str) -> None:
        """`section`: the result of `mrope_section`; `backend`: name of the attention backend."""
        self.table = table
        axes = axes_of_pairs(section, table.cos.shape[1])
        self.axes = torch.tensor(axes, device=table.cos.device)  # int64 [head_dim / 2]
        self.gather = _gather_of(backend)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of int64 positions, each float32 `[num_tokens, head_dim / 2]`.

        `positions`: `[num_tokens]` for a step without images, which is computed as in m3; else `[3, num_tokens]`.
        """
        if positions.dim() == 1:
            return self.table(positions)
        return self.gather(positions, self.table.cos, self.table.sin, self.axes)


def mrope_section(name: str, rope_parameters: Mapping[str, Any], head_dim: int) -> tuple[int, int, int]:
    """Return the number of pairs of a head that are rotated by time, height and width.

    Raises `ModelLoadError`, with the model's `name`, for sections that do not add up to all pairs of `head_dim`, and
    for a model that assigns them in another order.
    """
    if rope_parameters.get("mrope_interleaved", True) is not True:
        raise ModelLoadError(
            f"{name}: mrope_interleaved={shown(rope_parameters['mrope_interleaved'])} in rope_parameters: only "
            f"pairs assigned in turn are supported (Qwen3-VL), no sections one after another (Qwen2-VL)"
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
    axes = axes_of_pairs((counts[0], counts[1], counts[2]), pairs)
    if [axes.count(axis) for axis in (TIME, HEIGHT, WIDTH)] != list(counts):
        raise ModelLoadError(
            f"{name}: mrope_section={shown(section)} cannot be assigned in turn: every third of the {pairs} pairs is "
            f"height's or width's, at most {(pairs + 1) // 3} and {pairs // 3}"
        )
    return counts[0], counts[1], counts[2]


def axes_of_pairs(section: tuple[int, int, int], pairs: int) -> list[int]:
    """Return the axis of each of a head's `pairs`: T H W in turn, then T alone after the pairs of height and width."""
    return [pair % 3 if pair < 3 * section[pair % 3] else TIME for pair in range(pairs)]


def gather_with_torch(positions: Tensor, cos: Tensor, sin: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the rows with tensor operations: each pair looks up the position on its own axis."""
    rows = positions.index_select(0, axes).t()  # [n, pairs]
    return cos.gather(0, rows), sin.gather(0, rows)


def _gather_of(backend: str) -> Gather:
    if backend != "triton":
        return gather_with_torch
    from m6_multimodal_pd.models.triton_mrope import gather_with_triton  # imported for this backend alone

    return gather_with_triton
