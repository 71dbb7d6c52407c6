"""Tensors in, tokens out, with a vision tower in front.

m5's runner, which prepares a step in one place and calls the model in one place: before the first, pictures that are
new are encoded, all of the step in one pass; to the second their embeddings are handed. What the tower has made is kept
by content (`multimodal/embedding_cache.py`). Of a request one number is kept, by its row: by how much its positions
exceed its places. SGLang: `general_mm_embed_routine`; vLLM: `_execute_mm_encoder` and `_gather_mm_embeddings`.
"""

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.tracer import Tracer
from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch
from m5_chunked_prefill_spec.model_runner import ModelRunner as TextModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.events import EncoderHit, EncoderRun
from m6_multimodal_pd.forward_batch import ForwardBatch, Seen, seen_in
from m6_multimodal_pd.model_loader import LoadedModel
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from m6_multimodal_pd.models.vision import Grid, VisionTower
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem
from m6_multimodal_pd.outputs import EncoderTotals


class ModelRunner(TextModelRunner):
    """m5's, for prompts with pictures."""

    released = ("kv", "model", "vision")

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        embedding_cache: EmbeddingCache,
        encoder_budget: int,
        tracer: Tracer,
        **settings: Any,
    ) -> None:
        """`encoder_budget`: what a step is allowed to encode, for the trace; the scheduler keeps to it."""
        super().__init__(loaded_model=loaded_model, **settings)
        self.vision = loaded_model.vision
        self.embedding_cache, self.encoder_budget, self.tracer = embedding_cache, encoder_budget, tracer
        self.encoder_totals = EncoderTotals()
        self.mrope_deltas = np.zeros(0, dtype=np.int64)  # by row, as many as the pool has made so far

    def prepare(self, batch: ModelWorkerBatch) -> Any:
        """A step as tensors; pictures that are in it and not encoded yet are encoded now."""
        text = TextForwardBatch.init_new(batch, self)
        if self.vision is None:
            return text
        rows, num_rows = batch.req_pool_indices, len(self.req_to_token_pool.lens)
        if len(self.mrope_deltas) < num_rows:
            self.mrope_deltas = np.resize(self.mrope_deltas, num_rows)  # a new row is written before it is read
        for row, inputs in zip(rows, batch.multimodal_inputs, strict=False):
            self.mrope_deltas[row] = 0 if inputs is None else inputs.mrope_position_delta
        seen = seen_in(batch)
        embeddings = self._embeddings(batch, seen) if seen else {}
        stretches = [(s, embeddings[s.item.hash][s.first : s.first + s.count]) for s in seen]
        return ForwardBatch.init_new(text, batch, self.mrope_deltas[rows], stretches)

    def forward(self, batch: Any) -> Tensor:
        """Hidden states `[total_tokens, hidden_size]`. The one place where the model is called."""
        if isinstance(batch, TextForwardBatch):
            return super().forward(batch)
        assert isinstance(self.model, Qwen3VLDecoder)
        return self.model.forward(batch.input_ids, batch.positions, self.kv, batch.attn_metadata, batch.visual)

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once, on nothing, and before it the tower on as much as a step may encode."""
        if self.vision is not None:
            self.vision.encode([blank(self.vision, self.encoder_budget)])
        return super().profile_run(num_tokens)

    def _embeddings(self, batch: ModelWorkerBatch, seen: list[Seen]) -> dict[str, Tensor]:
        """The embeddings of all items of a step, by content: found, or made now."""
        items = {s.item.hash: s.item for s in seen}
        found = {content: self.embedding_cache.get(content) for content in items}
        known = {content: embeddings for content, embeddings in found.items() if embeddings is not None}
        missing = [item for content, item in items.items() if content not in known]
        self._count_hits(batch, seen, known)
        if missing:
            users = {s.item.hash: [batch.rids[other.row] for other in seen if other.item is s.item] for s in seen}
            known |= self._encode(missing, users)
            for item in missing:
                self.embedding_cache.put(item.hash, known[item.hash], in_use=items.keys())
        return known

    def _encode(self, items: list[MultimodalDataItem], users: dict[str, list[str]]) -> dict[str, Tensor]:
        """Run the tower over some items."""
        assert self.vision is not None
        began = time.perf_counter()
        pixels = [(torch.from_numpy(item.feature).to(self.device), item.grid_thw) for item in items]
        made = dict(zip((item.hash for item in items), self.vision.encode(pixels), strict=True))
        seconds = time.perf_counter() - began
        num_tokens = sum(item.num_tokens for item in items)
        self.encoder_totals.add_run(len(items), num_tokens, seconds)
        if self.tracer:
            rids = dict.fromkeys(rid for item in items for rid in users[item.hash])
            self.tracer.emit(
                EncoderRun(
                    rids=tuple(rids),
                    hashes=tuple(item.hash for item in items),
                    num_tokens=num_tokens,
                    num_patches=sum(len(item.feature) for item in items),
                    budget=self.encoder_budget,
                    milliseconds=seconds * 1e3,
                )
            )
        return made

    def _count_hits(self, batch: ModelWorkerBatch, seen: list[Seen], known: dict[str, Tensor]) -> None:
        """Whoever reads embeddings that were there before, or that another request of the step has made now."""
        read: dict[tuple[int, str], int] = {}
        makers: dict[str, int] = {}
        for s in seen:
            if s.item.hash in known or makers.setdefault(s.item.hash, s.row) != s.row:
                read[s.row, s.item.hash] = read.get((s.row, s.item.hash), 0) + s.count
        sizes = {s.item.hash: s.item.num_tokens for s in seen}
        for (row, content), num_read in read.items():
            self.encoder_totals.num_hits += 1
            if self.tracer:
                self.tracer.emit(
                    EncoderHit(rid=batch.rids[row], hash=content, num_tokens=sizes[content], num_read=num_read)
                )


def blank(tower: VisionTower, num_tokens: int) -> tuple[Tensor, Grid]:
    """A square image of about so many tokens, with nothing in it."""
    side = max(math.isqrt(num_tokens), 1) * tower.merge_size
    return torch.zeros(side * side, tower.patch_dim), (1, side, side)
