"""A batch on the device, in which some tokens are pictures.

m5's layout, with two things more: where a token sits, which for a picture takes three numbers, and which tokens have an
embedding of their own instead of the vocabulary's. Both are needed for prompts only. Whoever decodes sits on all three
axes at the same position, a fixed distance from its place; so a step without pictures takes m3's way through the model,
tables and kernels included. SGLang: `ForwardBatch.mrope_positions`; vLLM: `_calc_mrope_positions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch, ranges
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.models.qwen3_vl import VisualTokens
from m6_multimodal_pd.multimodal.encoder import Seen
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs


class PromptPiece(NamedTuple):
    """A prompt with pictures, or a piece of one, in a step."""

    row: int
    """In the batch."""
    start: int
    """The first of its tokens that is new in this step."""
    end: int
    """Behind the last one."""
    inputs: MultimodalInputs


def prompts_with_pictures(batch: ModelWorkerBatch) -> list[PromptPiece]:
    """Those of a step, in the order of the batch."""
    return [
        PromptPiece(row, int(batch.seq_lens[row] - batch.new_lens[row]), int(batch.seq_lens[row]), inputs)
        for row, inputs in enumerate(batch.multimodal_inputs)
        if inputs is not None
    ]


def seen_in(prompts: Sequence[PromptPiece], rids: Sequence[str]) -> list[Seen]:
    """All pictures, and parts of pictures, among the new tokens of a step, in the order of the batch."""
    return [
        Seen(item, rids[prompt.row], prompt.row, place - prompt.start, first, last - first)
        for prompt in prompts
        for item in prompt.inputs.mm_items
        for place, first, last in item.rows(prompt.start, prompt.end)
    ]


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
        prompts: Sequence[PromptPiece],
        seen: Sequence[Seen],
        embeddings: Sequence[Tensor],
    ) -> "ForwardBatch":
        """Put pictures into a layout. `deltas`: int64 `[batch_size]`, by how much positions exceed places;
        `prompts`: those that hold pictures; `embeddings`: `[count, width]` of each stretch that is `seen`."""
        positions = text.positions
        if deltas.any():
            of_tokens = np.empty(len(batch.input_ids), dtype=np.int64)
            of_tokens[ranges(text.starts, batch.new_lens)] = np.repeat(deltas, batch.new_lens)
            positions = positions + torch.as_tensor(of_tokens, device=positions.device)
        if prompts:
            positions = _with_prompts(positions, text.starts, prompts, is_seen=bool(seen))
        if not seen:
            return cls(text, positions, None)
        places = np.concatenate([np.arange(s.count) + text.starts[s.row] + s.place for s in seen])
        visual = VisualTokens(torch.as_tensor(places, device=positions.device), torch.cat(list(embeddings)))
        return cls(text, positions, visual)


def _with_prompts(positions: Tensor, starts: np.ndarray, prompts: Sequence[PromptPiece], *, is_seen: bool) -> Tensor:
    """The positions with those of prompts that hold pictures; three axes only if a picture is in this step."""
    positions = positions.repeat(3, 1) if is_seen else positions.clone()
    for prompt in prompts:
        start = int(starts[prompt.row])
        own = torch.as_tensor(prompt.inputs.positions(prompt.start, prompt.end), device=positions.device)
        positions[..., start : start + own.shape[1]] = own if is_seen else own[0]
    return positions
