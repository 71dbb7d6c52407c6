"""A batch on the device in which some tokens belong to images.

m5's layout with two additions: the positions, which have three axes for the tokens of an image (M-RoPE), and the
embeddings that replace those of the vocabulary. Both are for prompts: a token that is decoded has the same position on
all three axes, at a constant distance from its index, so that a step without images goes through the model as in m3.
SGLang: `ForwardBatch.mrope_positions`; vLLM: `_calc_mrope_positions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch, ranges
from m6_multimodal_pd.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.models.qwen3_vl import VisualTokens
from m6_multimodal_pd.multimodal.encoder import ItemSlice


@dataclass(eq=False)
class ForwardBatch(TextForwardBatch):
    """One forward's tensors. `positions` are int64 `[3, total_tokens]` if images are in this step, else one axis."""

    visual: VisualTokens | None
    """The tokens that belong to images; None if there are none in this step."""

    @classmethod
    def with_images(
        cls,
        text: TextForwardBatch,
        batch: ModelWorkerBatch,
        slices: Sequence[ItemSlice],
        embeddings: Sequence[Tensor],
    ) -> "ForwardBatch":
        """Add images to a layout on the host. `embeddings`: `[count, width]` of each of `slices`, on the device."""
        visual = None
        if slices:
            places = np.concatenate([np.arange(s.count) + text.starts[s.row] + s.place for s in slices])
            visual = VisualTokens(torch.from_numpy(places), torch.cat(list(embeddings)))
        positions = mrope_positions(text, batch, num_axes=3 if slices else 1)
        return cls(**vars(text) | {"positions": positions}, visual=visual)


def slices_of(batch: ModelWorkerBatch) -> list[ItemSlice]:
    """Return the images, and parts of images, among the new tokens of a step, in the order of the batch."""
    return [
        ItemSlice(item, batch.rids[piece.row], piece.row, place - piece.start, first, last - first)
        for piece in batch.prompts_with_images()
        for item in piece.inputs.mm_items
        for place, first, last in item.rows(piece.start, piece.end)
    ]


def mrope_positions(text: TextForwardBatch, batch: ModelWorkerBatch, *, num_axes: int) -> Tensor:
    """Return the positions of a step's tokens: int64 `[total_tokens]` for one axis, `[3, total_tokens]` for three."""
    deltas = [0 if inputs is None else inputs.mrope_position_delta for inputs in batch.multimodal_inputs]
    of_tokens = np.empty(len(batch.input_ids), dtype=np.int64)
    of_tokens[ranges(text.starts, batch.new_lens)] = np.repeat(deltas, batch.new_lens)
    positions = text.positions + torch.from_numpy(of_tokens)
    if num_axes == 3:
        positions = positions.repeat(3, 1)
    for piece in batch.prompts_with_images():
        start = int(text.starts[piece.row])
        own = torch.from_numpy(piece.inputs.positions(piece.start, piece.end))
        positions[..., start : start + own.shape[1]] = own if num_axes == 3 else own[0]
    return positions
