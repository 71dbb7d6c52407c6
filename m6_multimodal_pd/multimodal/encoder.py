"""The vision tower at work: what a step needs of it is found or made, and kept.

All pictures that are new in a step go through the tower in one pass, whoever they belong to; one that two requests
bring is encoded once. What was made is kept by content in the embedding cache, for the next piece of a prompt that was
cut inside a picture, and for later requests. New in this milestone. SGLang: `general_mm_embed_routine`; vLLM:
`_execute_mm_encoder` and `_gather_mm_embeddings` of its model runner.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.events import EncoderHit, EncoderRun
from m6_multimodal_pd.models.vision import VisionTower
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem


@dataclass(frozen=True)
class Seen:
    """What one prompt of a step holds of one item: `count` embeddings from `first` on, at `place` among its tokens."""

    item: MultimodalDataItem
    rid: str
    row: int
    """The prompt, by its row in the batch."""
    place: int
    first: int
    count: int


class Encoder:
    """Makes embeddings of pictures, and counts what that took."""

    def __init__(self, *, tower: VisionTower | None, cache: EmbeddingCache, budget: int, tracer: Tracer) -> None:
        """`tower`: None for a model that takes texts only. `budget`: what a step may encode, for the trace; the
        scheduler keeps to it."""
        self.tower, self.cache, self.budget, self.tracer = tower, cache, budget, tracer
        self.num_runs = self.num_items = self.num_tokens = self.num_hits = 0
        self.seconds = 0.0

    def embed(self, seen: Sequence[Seen]) -> list[Tensor]:
        """The embeddings of each stretch of a step, `[count, width]`; what is not there yet is made now."""
        items = {s.item.hash: s.item for s in seen}
        found = {content: self.cache.get(content) for content in items}
        known = {content: embeddings for content, embeddings in found.items() if embeddings is not None}
        missing = [item for content, item in items.items() if content not in known]
        self._count_hits(seen, known)
        if missing:
            rids = dict.fromkeys(s.rid for s in seen if s.item.hash not in known)
            known |= self._run(missing, tuple(rids))
            for item in missing:
                if known[item.hash].isfinite().all():  # what is no number fails this step's request, and no later one
                    self.cache.put(item.hash, known[item.hash], in_use=items.keys())
        return [known[s.item.hash][s.first : s.first + s.count] for s in seen]

    def clear(self) -> None:
        """Keep nothing of what was made."""
        self.cache.clear()

    def close(self) -> None:
        """Keep nothing, and let go of the tower: the engine object may live on."""
        self.clear()
        self.tower = None

    def counters(self) -> dict[str, Any]:
        """Return the totals of `EngineStats` that are the encoder's, by field."""
        return {
            "num_encoder_runs": self.num_runs,
            "num_encoded_items": self.num_items,
            "num_encoded_tokens": self.num_tokens,
            "num_encoder_hits": self.num_hits,
            "encoder_seconds": self.seconds,
            "num_evicted_items": self.cache.num_evicted,
        }

    def _run(self, items: list[MultimodalDataItem], rids: tuple[str, ...]) -> dict[str, Tensor]:
        """Run the tower over some items, for these requests."""
        assert self.tower is not None
        began = time.perf_counter()
        made = self.tower.encode([(torch.from_numpy(item.feature), item.grid_thw) for item in items])
        seconds = time.perf_counter() - began
        num_tokens = sum(item.num_tokens for item in items)
        self.num_runs += 1
        self.num_items += len(items)
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.tracer.emit(EncoderRun.of, rids, items, num_tokens, self.budget, seconds)
        return {item.hash: embeddings for item, embeddings in zip(items, made, strict=True)}

    def _count_hits(self, seen: Sequence[Seen], known: dict[str, Tensor]) -> None:
        """Count the requests' reads of embeddings that another step, or another request of this step, has made."""
        makers: dict[str, int] = {}
        read: dict[tuple[str, str], int] = {}
        for s in seen:
            if s.item.hash in known or makers.setdefault(s.item.hash, s.row) != s.row:
                read[s.rid, s.item.hash] = read.get((s.rid, s.item.hash), 0) + s.count
        self.num_hits += len(read)
        sizes = {s.item.hash: s.item.num_tokens for s in seen}
        for (rid, content), num_read in read.items():
            self.tracer.emit(EncoderHit, rid=rid, hash=content, num_tokens=sizes[content], num_read=num_read)
