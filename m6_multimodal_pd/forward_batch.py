"""A batch on the device, in which some tokens are pictures.

m5's layout, with two things more: where a token sits, which for a picture takes three numbers, and which tokens have an
embedding of their own instead of the vocabulary's. Both are needed for prompts only. Whoever decodes sits on all three
axes at the same position, a fixed distance from its place; so a step without pictures takes m3's way through the model,
tables and kernels included. SGLang: `ForwardBatch.mrope_positions`; vLLM: `_calc_mrope_positions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch, ranges
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.models.qwen3_vl import VisualTokens
from m6_multimodal_pd.multimodal.encoder import Seen
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs


def seen_in(batch: ModelWorkerBatch) -> list[Seen]:
    """All pictures, and parts of pictures, among the new tokens of a step, in the order of the batch."""
    found: list[Seen] = []
    for row, inputs in enumerate(batch.multimodal_inputs):
        if inputs is not None:
            end = int(batch.seq_lens[row])
            start = end - int(batch.new_lens[row])
            found += [
                Seen(item, batch.rids[row], row, place - start, first, last - first)
                for item in inputs.mm_items
                for place, first, last in item.rows(start, end)
            ]
    return found


@dataclass(frozen=True)
class ForwardBatch:
    """One forward's tensors."""

    text: TextForwardBatch
    positions: Tensor
    """int64 `[total_tokens]`, or `[3, total_tokens]` if some of them are a picture's."""
    visual: VisualTokens | None
    """The tokens that are pictures; None: there are none."""

    @property
    def input_ids(self) -> Tensor:
        return self.text.input_ids

    @property
    def attn_metadata(self) -> AttentionMetadata:
        return self.text.attn_metadata

    @property
    def logits_indices(self) -> Tensor | None:
        return self.text.logits_indices

    @property
    def starts(self) -> np.ndarray:
        return self.text.starts

    @classmethod
    def init_new(
        cls,
        text: TextForwardBatch,
        batch: ModelWorkerBatch,
        deltas: np.ndarray,
        seen: Sequence[Seen],
        embeddings: Sequence[Tensor],
    ) -> "ForwardBatch":
        """Put pictures into a layout. `deltas`: int64 `[batch_size]`, by how much positions exceed places;
        `embeddings`: `[count, width]` of each stretch that is `seen`."""
        positions = text.positions
        if deltas.any():
            of_tokens = np.empty(len(batch.input_ids), dtype=np.int64)
            of_tokens[ranges(text.starts, batch.new_lens)] = np.repeat(deltas, batch.new_lens)
            positions = positions + torch.as_tensor(of_tokens, device=positions.device)
        prompts = [(row, inputs) for row, inputs in enumerate(batch.multimodal_inputs) if inputs is not None]
        if prompts:
            positions = _with_prompts(positions, text, batch, prompts, is_seen=bool(seen))
        if not seen:
            return cls(text, positions, None)
        places = np.concatenate([np.arange(s.count) + text.starts[s.row] + s.place for s in seen])
        visual = VisualTokens(torch.as_tensor(places, device=positions.device), torch.cat(list(embeddings)))
        return cls(text, positions, visual)


def _with_prompts(
    positions: Tensor,
    text: TextForwardBatch,
    batch: ModelWorkerBatch,
    prompts: Sequence[tuple[int, MultimodalInputs]],
    *,
    is_seen: bool,
) -> Tensor:
    """The positions with those of prompts that hold pictures; three axes only if a picture is in this step."""
    positions = positions.repeat(3, 1) if is_seen else positions.clone()
    for row, inputs in prompts:
        end, start = int(batch.seq_lens[row]), int(text.starts[row])
        own = torch.as_tensor(inputs.positions(end - int(batch.new_lens[row]), end), device=positions.device)
        positions[..., start : start + own.shape[1]] = own if is_seen else own[0]
    return positions
